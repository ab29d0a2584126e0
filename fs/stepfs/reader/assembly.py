"""One reader without a mount, from beginning to end: the parts of a mount, and the answers to reads and waits.

Everything here runs in one trio loop. Where a mount has an errno, this has an exception of `stepfs.errors`. `view` and
`follow` decide, as in a mount, which steps exist, which reads wait, and for how long.
"""

import errno
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

import trio

from stepfs import errors
from stepfs._internal import tracing
from stepfs.data.announced_orders import Hint
from stepfs.data.buffers import MAPPED_BYTES_MIN, Buffer, Pool
from stepfs.data.fetch import CONNECTIONS_MAX
from stepfs.data.slices import SliceHandle
from stepfs.follow.parts import LakeParts
from stepfs.follow.waits import WaitOutcome
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step
from stepfs.format.snapshot import LogState, StepEntry
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.reader.options import LakeOptions
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs.store.silence import Silence
from stepfs.view.inodes import STEP_MAX
from stepfs.view.ranks import check_steps, hinted_slices

_log = logging.getLogger("stepfs.reader")

LENT_SHARE: Final = 4  # one part in so many of the budget

OpenStore = Callable[[LakeOptions, Silence], Store]
_CALLER = 0  # waits of a mount know the process that waits; here it waits in this very process


class CopyPool:
    """Copies whole slices for callers."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: of memory that is kept for reuse, the part that callers hold included."""
        self._pool = Pool(bytes_max)

    async def copy_of(self, handle: SliceHandle) -> memoryview:
        """The whole slice, read-only and contiguous; it stays valid while the caller holds it.

        Raises as `SliceHandle.read` does.
        """
        if handle.length < MAPPED_BYTES_MIN:
            return memoryview(bytes(await handle.read(0, handle.length)))
        pooled = self._pool.take(handle.length)
        buffer = pooled or Buffer(handle.length, handle.length)
        view = buffer.view()
        try:
            for start in range(0, handle.length, BLOCK_BYTES):
                part = await handle.read(start, BLOCK_BYTES)
                view[start : start + len(part)] = part
                del part  # a view held meanwhile keeps memory from the block awaited
                await trio.lowlevel.checkpoint()
            return view.toreadonly()
        finally:
            if pooled is not None:
                self._pool.give(pooled)  # it lingers, counted, until no caller sees it


class ReaderParts(LakeParts):
    """The parts of one reader; `running` runs them. Other threads may use `tree` and `log.state`, and nothing else."""

    def __init__(self, options: LakeOptions, store: Store, log: LogReader, *, memory_bytes: int) -> None:
        """`memory_bytes`: for all bytes, those that callers hold included. Raises as `stepfs mount` refuses."""
        check_steps(options.steps, log.state)
        self.options = options
        self.ranks = options.ranks_of(log.identity.grid)
        super().__init__(
            options,
            store,
            log,
            memory_bytes=memory_bytes - memory_bytes // LENT_SHARE,
            open_origin=lambda url: open_store(url, options=options.store_options.for_origin()),
            hinted=hinted_slices(options.ranks, self.ranks, options.files_of(log.identity.grid)),
            start=STEP_MAX,  # nothing is fetched before a step was opened or announced: the caller says where it begins
            guesses=not options.is_worker,
            connections=options.store_options.connections or CONNECTIONS_MAX,
        )
        self.waits.tell, self.waits.among_workers = _log.warning, options.is_worker
        self._copies = CopyPool(memory_bytes // LENT_SHARE)
        self._reads = 0
        # The process that made the `Lake` speaks for the workers of its loader.
        if options.group is not None and not options.is_worker:
            self.group = self.group_follower(options.group)

    def answered(self) -> int:
        return self._reads

    async def sums(self) -> dict[str, Any]:
        return self.slices.ledger.sums()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Register the group, then run everything until the context is left. Raises `ReplacedError` in it."""
        await self.register()
        try:
            async with trio.open_nursery() as background:
                await self.start(background)
                if self.group is not None:
                    await background.start(self.group.run)
                yield
                background.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self.close_stores()

    async def read(self, step: Step, index: SliceIndex, *, waits: bool = False) -> memoryview:
        """The bytes of a slice, verified. With `waits`, wait for its commit even if the options do not.

        `NoSuchStepError`, `ReclaimedError`, `WaitExpiredError` as `wait_for`; `CorruptError` names the object;
        `StoreUnreachableError` once the store did not deliver within the deadline.
        """
        self._reads += 1
        began_s = trio.current_time() if tracing.ring is not None else 0.0
        entry = await self._entry(step, waits=waits)
        handle = self.slices.open(entry, index)
        try:
            copy = await self._copies.copy_of(handle)
        except errors.AbsentError as error:
            await self._explain_absence(step, error)
        else:
            if tracing.ring is not None and began_s:
                took_s = trio.current_time() - began_s
                tracing.ring.add(f"slice {index}: reader", f"read step {step}", took_s, step=step, size=len(copy))
            return copy
        finally:
            handle.close()

    async def wait_for(self, step: Step, *, waits: bool) -> bool:
        """True once the step can be read. False, only with `waits`: the view ends before it."""
        if waits and self._ends_before(step):
            return False
        try:
            await self._entry(step, waits=waits)
        except errors.NoSuchStepError:
            if waits and self._ends_before(step):
                return False
            raise
        return True

    async def announce(self, hint: Hint) -> None:
        self.prefetcher.accept(hint)

    async def holds(self, step: Step, index: SliceIndex) -> bool:
        return self.slices.holds(step, index)

    def _ends_before(self, step: Step) -> bool:
        steps = self.options.steps
        if steps is not None and step >= steps.stop:
            return True
        return self.log.state.sealed and step >= self.tree.next_step

    async def _entry(self, step: Step, *, waits: bool) -> StepEntry:
        """The entry of a step that may be read; waits for it as a mount would."""
        found = await self.waits.for_files(step, _CALLER, waits=waits)
        if isinstance(found, StepEntry):
            return found
        if found is WaitOutcome.SILENT:
            raise errors.StoreUnreachableError(
                f"the index of step {step} could not be read within {self.options.deadline_s:g} s; check the store"
            )
        raise self._expired(step) if found is WaitOutcome.EXPIRED else self._absent(step)

    def _expired(self, step: Step) -> errors.StepfsError:
        waited_s = self.options.deadline_s if self.options.wait_s is None else self.options.wait_s
        trouble = self.follower.trouble
        message = (
            f"step {step} was not seen within {waited_s:g} s: the lake cannot be followed: {trouble}"
            if trouble
            else f"step {step} was not committed within {waited_s:g} s; look at its producers with `stepfs status`"
        )
        if self.waits.expired_errno == errno.ETIMEDOUT:
            return errors.WaitExpiredError(message)
        return errors.NoSuchStepError(message)

    def _absent(self, step: Step) -> errors.StepfsError:
        tree, steps = self.tree, self.options.steps
        if steps is not None and step not in steps:
            return errors.NoSuchStepError(
                f"step {step} is outside of the steps {steps.start}:{steps.stop} of this view"
            )
        if step < self.log.first_live_step:
            if home := self.log.identity.replica_of:
                return errors.ReclaimedError(
                    f"step {step} is not in this replica, which has the steps from {self.log.first_live_step} on: see {home}"
                )
            return errors.ReclaimedError(
                f"step {step} was reclaimed: no checkpoint that is kept needs it; the lake begins at step"
                f" {self.log.first_live_step}"
            )
        if step < tree.first_visible():
            return errors.ReclaimedError(
                f"group {self.options.group!r} needs nothing below step {tree.need}: its checkpoints gave step {step} up"
            )
        if step < tree.next_step:
            return errors.ReclaimedError(f"step {step} was reclaimed a moment ago: no checkpoint that is kept needs it")
        sealed = "; the lake is sealed, no more will come" if self.log.state.sealed else ""
        return errors.NoSuchStepError(f"step {step} is not committed: {tree.next_step} steps are{sealed}")

    async def _explain_absence(self, step: Step, error: errors.AbsentError) -> NoReturn:
        """The object of a committed step is gone: with its whole lake, or reclaimed a moment ago, or lost."""
        await self.follower.check_identity()
        await self.log.control.refresh()
        first_live = self.log.control.first_live_step
        if step < first_live:
            raise errors.ReclaimedError(
                f"step {step} was reclaimed while it was read; the lake begins at step {first_live}"
            ) from error
        raise errors.CorruptError(*error.args) from error


def _store_of(options: LakeOptions, silence: Silence) -> Store:
    return open_store(options.url, options=options.store_options, silence=silence)


@asynccontextmanager
async def open_reader(
    options: LakeOptions,
    lake_id: str | None = None,
    known: LogState | None = None,
    *,
    open_store: OpenStore = _store_of,
    memory_bytes: int | None = None,
) -> AsyncIterator[ReaderParts]:
    """The parts of a reader, running. `lake_id`: the lake that must be there. `known`: its log, as an
    earlier reader saw it.

    Raises before it begins what `stepfs mount` refuses: `AbsentError`, `RefusedError`, `UsageError`,
    `StoreUnreachableError`. Later, inside, only `ReplacedError`.
    """
    silence = Silence(_log.warning)
    store = open_store(options, silence)
    try:
        identity = await open_lake(store)
        if lake_id not in {None, identity.lake_id}:
            raise errors.RefusedError(f"{store.url}: here is lake {identity.lake_id}, not {lake_id}: it was replaced")
        log = await (
            LogReader.continued(store, identity, known) if known else LogReader.open(store, identity, reads_only=True)
        )
        memory_bytes = options.memory_share if memory_bytes is None else memory_bytes
        assembly = ReaderParts(options, store, log, memory_bytes=memory_bytes)
        async with assembly.running():
            silence.end()  # a reader that runs survives an outage
            yield assembly
    finally:
        with trio.CancelScope(shield=True):
            await store.aclose()
