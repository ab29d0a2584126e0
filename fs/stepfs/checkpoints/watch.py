"""Following a checkpoint directory: new checkpoints are kept, vanished ones dropped, the same on every node.

Nodes that share the directory all watch it; the first node that sees a change records it, and the others find the
record. A node acts on *changes* of its own view, not on differences between its view and the record: a node whose
network file system shows it an old listing would otherwise undo the changes of others. The start is the one exception:
a checkpoint that the group keeps and that is no longer on disk was deleted while no node watched.

A checkpoint that cannot be recorded does not stop the others: checkpoints that come too late, that lie beyond the
group's readers, or whose counter gives no step are left out, and logged once.

A directory that vanishes as a whole is an accident (an unmounted volume), never "all checkpoints were deleted".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final

import trio

from stepfs.checkpoints.formats import Found, Place, look
from stepfs.checkpoints.next_step import NextStep
from stepfs.checkpoints.plausible import HeldBack, Progress
from stepfs.errors import AbsentError, StepfsError, StoreUnreachableError, UsageError, WithdrawnError
from stepfs.format.ids import Step
from stepfs.format.records import ConsumerRecord
from stepfs.lake.groups import Group

_log = logging.getLogger("stepfs.checkpoints")

POLL_S: Final = 1.0
_FAILURES_TOLD: Final = 60

Look = Callable[[], Found]
Changed = Callable[[ConsumerRecord], None]


class Watch:
    """One node's view of the checkpoints of one group."""

    def __init__(
        self,
        group: Group,
        place: Place,
        next_step: NextStep,
        *,
        changed: Changed | None = None,
        look_at: Look | None = None,
        progress: Callable[[], Progress] | None = None,
        trusts: bool = False,
    ) -> None:
        """`progress`: of the group's readers; checkpoints beyond it are held back, unless the watcher `trusts`
        them."""
        self._group = group
        self._next_step = next_step
        self._look = look_at or (lambda: look(place))
        self._changed = changed or (lambda _: None)
        self._progress = progress
        self._held_back = HeldBack(progress, trusts=trusts) if progress is not None else None
        self._threads = trio.CapacityLimiter(1)
        self._seen: frozenset[Step] | None = None  # None until the directory could be read once
        self._late: frozenset[Step] = frozenset()  # on disk, but steps that they need are reclaimed
        self._told_counters: set[int] = set()  # logged: they give no step

    async def run(self, *, poll_s: float = POLL_S) -> None:
        """Look repeatedly; problems are logged and retried, never fatal to the mount."""
        warned = ""
        failures = 0  # in a row
        while True:
            try:
                await self.look_once()
                warned, failures = "", 0
            except AbsentError as error:
                if str(error) != warned:
                    _log.warning("%s: nothing is recorded until it does", error)
                    warned = str(error)
            except StoreUnreachableError as error:
                failures += 1
                if failures == 1:
                    _log.info("checkpoint not recorded yet: %s", error)
                elif failures == _FAILURES_TOLD:
                    _log.warning("checkpoints have not been recorded %d times in a row: %s", failures, error)
            except StepfsError as error:
                if str(error) != warned:
                    _log.warning("checkpoint not recorded: %s", error)
                    warned = str(error)
            await trio.sleep(poll_s)

    async def last_look(self) -> str:
        """Record the changes since the last look, before the mount ends. Returns '' or the reason of a failure."""
        try:
            await self.look_once(at_the_end=True)
        except AbsentError as error:
            _log.debug("%s", error)
        except StepfsError as error:
            return str(error)
        return ""

    async def look_once(self, *, at_the_end: bool = False) -> None:
        """Compare the directory with the last look and record the difference."""
        try:
            # A hanging file system must not keep the mount from ending; at most one thread may hang in it.
            found = await trio.to_thread.run_sync(self._look, abandon_on_cancel=True, limiter=self._threads)
        except OSError as error:
            # The trainer deletes an old one meanwhile, or a network file system fails briefly. Repeat the whole look:
            # a look without the unreadable entries would drop a checkpoint that exists.
            raise StoreUnreachableError(f"cannot read the checkpoints: {error}") from error
        complete, barred = self._steps(found.complete, told=True), self._steps(found.barred)
        seen = self._seen or frozenset()
        self._late &= complete
        now = (complete - self._late) | (barred & seen)  # barred now, but known before: not deleted
        if self._held_back is not None:
            now -= self._held_back.among(now - seen, at_the_end=at_the_end)
        if self._seen is None and not now | barred:
            self._seen = now  # an empty directory proves nothing
        while now != self._seen:
            try:
                self._seen = await self._record(now, barred)
            except WithdrawnError as error:
                late = frozenset(step for step in now - seen if step in error.late)
                if not late:
                    raise
                self._leave_out(late)
                now -= late
            else:
                return

    async def _record(self, now: frozenset[Step], barred: frozenset[Step]) -> frozenset[Step]:
        """Record the changes up to `now`. Returns the checkpoints that the group should keep."""
        before: frozenset[Step] = frozenset()

        def follow(kept: frozenset[Step]) -> frozenset[Step]:
            nonlocal before
            before = kept
            return _follow(kept, self._seen, now | (barred & kept))

        opened = self._progress().opened if self._progress is not None else Step(0)
        record = await self._group.revise(follow, brings=now - (self._seen or frozenset()), opened=opened)
        if frozenset(record.kept) != before:
            _log.info("group %r keeps %s", self._group.name, list(record.kept))
        self._changed(record)
        return now | (barred & before)

    def _leave_out(self, late: frozenset[Step]) -> None:
        self._late |= late
        for step in sorted(late):
            _log.warning(
                "group %r: the checkpoint that resumes at step %d is not recorded, because steps that it needs are "
                "reclaimed; training cannot go on from it",
                self._group.name,
                step,
                extra={"step": step},
            )

    def _steps(self, counters: Collection[int], *, told: bool = False) -> frozenset[Step]:
        """The next steps of the counters. Counters that give none are left out; with `told` each is logged once."""
        steps = set()
        for counter in counters:
            try:
                steps.add(self._next_step(counter))
            except UsageError as error:
                if told and counter not in self._told_counters:
                    _log.warning("checkpoint not recorded: %s", error)
                    self._told_counters.add(counter)
        return frozenset(steps)


def _follow(kept: frozenset[Step], seen: frozenset[Step] | None, now: frozenset[Step]) -> frozenset[Step]:
    """The checkpoints to keep, from those `kept`, those `seen` last and those that exist `now`."""
    if seen is None:
        # A first, empty look proves nothing: the run may not have written its first checkpoint yet.
        return now or kept
    return (kept | (now - seen)) - (seen - now)
