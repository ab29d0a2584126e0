"""One reader without a mount, put together: the data layer of a mount, and what a read or a wait answers.

Everything here runs in one trio loop. Where a mount has an errno, this has an exception of `stepfs.errors`; which step is
there, what waits and for how long is decided by the same `view` and `follow` as in a mount.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import trio

from stepfs.data.fetch.concurrency import CONNECTIONS_MAX, ConcurrencyLimit
from stepfs.data.memory.pressure import MemoryGovernor
from stepfs.data.prefetch.order_hint import Hint
from stepfs.data.prefetch.prefetcher import Prefetcher
from stepfs.data.slices import Slices
from stepfs.errors import (
    AbsentError,
    CorruptError,
    NoSuchStepError,
    ReclaimedError,
    StoreUnreachableError,
    WaitExpiredError,
)
from stepfs.follow.changes import Changes
from stepfs.follow.committed_steps import CommittedSteps
from stepfs.follow.consumer_group import GroupFollower
from stepfs.follow.fleet_interval import FleetInterval
from stepfs.follow.follower import Follower
from stepfs.follow.waits import WaitOutcome, Waits
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.snapshot import StepEntry
from stepfs.lake.groups import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.reader.lending import LENT_SHARE, Lending
from stepfs.reader.options import LakeOptions
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs.view.naming import STEP_MAX
from stepfs.view.selection import check_steps, hinted_slices
from stepfs.view.tree import Presence, Tree, ViewOptions

_CALLER = 0  # waits of a mount know the process that waits; here it waits in this very process


class Assembly:
    """The parts of one reader; `running` runs them. Other threads may use `tree` and `log.state`, and nothing else."""

    def __init__(self, options: LakeOptions, store: Store, log: LogReader, *, memory_bytes: int) -> None:
        """`memory_bytes`: for all bytes, those that callers hold included. Raises as `stepfs mount` refuses."""
        check_steps(options.steps, log.state)
        self.options = options
        self.store = store
        self.log = log
        log.segments.in_thread = True
        self.ranks = options.ranks_of(log.identity.grid)
        self.tree = Tree(log, ViewOptions(options.steps, wait=options.wait_s is not None))
        self.opened = Step(0)  # one past the greatest step that was read here
        self._first_shown = self.tree.first_visible()
        self._changes = Changes()
        self._origins = OriginStores(
            store, lambda url: open_store(url, options=options.store_options.for_origin())
        )
        self._lending = Lending(memory_bytes // LENT_SHARE)
        self.slices = Slices(
            store,
            memory_bytes=memory_bytes - memory_bytes // LENT_SHARE,
            deadline_s=options.deadline_s,
            concurrency=ConcurrencyLimit(options.store_options.connections or CONNECTIONS_MAX),
            origin_store=self._origin_store,
        )
        self.prefetcher = Prefetcher(
            self.slices,
            CommittedSteps(self.tree, log),
            window=options.prefetch_steps,
            hinted=hinted_slices(options.ranks, self.ranks, options.files_of(log.identity.grid)),
            start=STEP_MAX,  # nothing is fetched before a step was opened or announced: the caller says where it begins
            guesses=not options.is_worker,
        )
        self.slices.reads.on_reading = self.prefetcher.note_open
        self._waits = Waits(
            self.tree, log, self._changes, deadline_s=options.deadline_s, wait_s=options.wait_s
        )
        self._fleet = FleetInterval(lambda: store.counts.throttled)
        self._follower = Follower(
            log,
            self._changes,
            poll_s=options.poll_s,
            find_lake_id=self._find_lake_id,
            on_change=self._changed,
            fleet=self._fleet,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Register the group, then run everything until the context is left. Raises `ReplacedError` in it."""
        group = self._group_follower()
        if group is not None:
            await group.register()
        try:
            async with trio.open_nursery() as background:
                for run in (
                    self._waits.run,
                    self.slices.run,
                    MemoryGovernor(self.slices).run,
                    self.prefetcher.run,
                    self._follower.run,
                ):
                    await background.start(run)
                if group is not None:
                    await background.start(group.run)
                yield
                background.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._origins.aclose()

    async def read(self, step: Step, index: SliceIndex, *, waits: bool = False) -> memoryview:
        """The bytes of a slice, verified. With `waits`, wait for its commit whatever the options say.

        `NoSuchStepError`, `ReclaimedError`, `WaitExpiredError` as `wait_for`; `CorruptError` names the object;
        `StoreUnreachableError` once the store did not deliver within the deadline.
        """
        entry = await self._entry(step, waits=waits)
        handle = self.slices.reads.open(entry, index)
        self.opened = max(self.opened, Step(step + 1))
        try:
            return await self._lending.copy_of(handle)
        except AbsentError as error:
            await self._explain_absence(step, error)
        finally:
            handle.close()

    async def wait_for(self, step: Step, *, waits: bool) -> bool:
        """True once the step can be read. False, only with `waits`: it will never come, because the view ends before
        it."""
        if waits and self._ends_before(step):
            return False
        try:
            await self._entry(step, waits=waits)
        except NoSuchStepError:
            if waits and self._ends_before(step):
                return False
            raise
        return True

    def announce(self, hint: Hint) -> None:
        """Fetch these steps ahead, in this order."""
        self.prefetcher.accept(hint)

    def _ends_before(self, step: Step) -> bool:
        steps = self.options.steps
        if steps is not None and step >= steps.stop:
            return True
        return self.log.state.sealed and step >= self.tree.next_step

    async def _entry(self, step: Step, *, waits: bool) -> StepEntry:
        """The entry of a step that may be read; waits for it as a mount would."""
        while True:
            presence = self.tree.presence(step)
            if presence is Presence.ABSENT and waits and self.tree.awaited(step):
                presence = Presence.PENDING
            if presence is Presence.PENDING:
                outcome = await self._waits.for_commit(step, _CALLER)
                if outcome is WaitOutcome.EXPIRED:
                    self._refuse_expired(step)
                if outcome is not WaitOutcome.READY:
                    self._refuse_absent(step)
                continue
            if presence is not Presence.COMMITTED:
                self._refuse_absent(step)
            entry = self.log.entry_if_loaded(step) or await self._load_entry(step)
            if self.tree.readable(step):
                return entry

    async def _load_entry(self, step: Step) -> StepEntry:
        """The entry of a committed step whose part of the index is not in memory."""
        found = await self._waits.for_entry(step, _CALLER)
        if isinstance(found, StepEntry):
            return found
        if found is WaitOutcome.EXPIRED:
            raise StoreUnreachableError(
                f"the index of step {step} could not be read within {self.options.deadline_s:g} s; check the store"
            )
        raise ReclaimedError(f"step {step} was reclaimed a moment ago: no checkpoint that is kept needs it")

    def _refuse_expired(self, step: Step) -> NoReturn:
        waited_s = self.options.deadline_s if self.options.wait_s is None else self.options.wait_s
        trouble = self._follower.trouble
        message = (
            f"step {step} was not seen within {waited_s:g} s: the lake cannot be followed: {trouble}"
            if trouble
            else f"step {step} was not committed within {waited_s:g} s; look at its producers with `stepfs status`"
        )
        if self._waits.expired_errno == errno.ETIMEDOUT:
            raise WaitExpiredError(message)
        raise NoSuchStepError(message)

    def _refuse_absent(self, step: Step) -> NoReturn:
        tree, steps = self.tree, self.options.steps
        if steps is not None and step not in steps:
            raise NoSuchStepError(
                f"step {step} is outside of the steps {steps.start}:{steps.stop} of this view"
            )
        if step < self.log.first_live_step:
            raise ReclaimedError(
                f"step {step} was reclaimed: no checkpoint that is kept needs it; the lake begins at step"
                f" {self.log.first_live_step}"
            )
        if step < tree.first_visible():
            raise ReclaimedError(
                f"group {self.options.group!r} needs nothing below step {tree.need}: its checkpoints gave step {step} up"
            )
        sealed = "; the lake is sealed, no more will come" if self.log.state.sealed else ""
        raise NoSuchStepError(f"step {step} is not committed: {tree.next_step} steps are{sealed}")

    async def _explain_absence(self, step: Step, error: AbsentError) -> NoReturn:
        """The object of a committed step is gone: with its whole lake, or reclaimed a moment ago, or lost."""
        await self._follower.check_identity()
        await self.log.control.refresh()
        first_live = self.log.control.first_live_step
        if step < first_live:
            raise ReclaimedError(
                f"step {step} was reclaimed while it was read; the lake begins at step {first_live}"
            ) from error
        raise CorruptError(*error.args) from error

    def _changed(self) -> None:
        """Steps came, or left the view."""
        first = self.tree.first_visible()
        if first > self._first_shown:
            self.slices.forget_below(first)
        self._first_shown = first  # it falls when a group rolls back to an older checkpoint
        self.prefetcher.note_frontier()

    def _group_follower(self) -> GroupFollower | None:
        name = self.options.group
        if name is None or self.options.is_worker:
            return None  # the process that made the `Lake` speaks for the workers of its loader
        return GroupFollower(
            Group.on(self.log.control, name),
            self.tree,
            self._changed,
            checkpoints=None,
            fleet=self._fleet,
            poll_s=lambda: self._follower.pace.interval_s,
            opened_here=lambda: self.opened,
        )

    async def _origin_store(self, origin: int) -> Store:
        return self._origins.open(self.log.state.origins[origin - 1])

    async def _find_lake_id(self) -> str:
        return (await open_lake(self.store)).lake_id
