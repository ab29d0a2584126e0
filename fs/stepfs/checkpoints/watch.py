"""Following a checkpoint directory: new checkpoints are kept, vanished ones dropped, the same on every node.

Nodes that share the directory all watch it; the first node that sees a change records it, and the others find the
record. A node drops only checkpoints that it saw vanish, never one that is merely on record: a node whose network
file system shows it an old listing would otherwise undo the changes of others, and a number that a user recorded is
no file. The start is the one exception: a checkpoint that the group keeps and that is no longer on disk was deleted
while no node watched.

Every look may be old (`difference` draws the conclusions), and a change that is sent may land late:

* a look that shows a checkpoint whose steps are reclaimed may be as old as that. It adds, and its drops wait until the
  caches of file systems have expired; if the checkpoint is still there, it is just late;
* a look without a change writes nothing and sends no request. But if the group's record, which the mount follows
  anyway, lacks for that long a checkpoint that this node sees, the node adds it;
* after a change without an answer the next look reconciles, even if it shows no change; the change at the start fences,
  because another life of this node may have sent one (`lake/decisions.py`).

So the directory decides: a checkpoint that a user drops by hand comes back while the directory holds it.

A checkpoint that cannot be recorded does not stop the others: checkpoints that come too late, that lie beyond the
group's readers, or whose counter gives no step are left out, and logged once.

A directory that vanishes as a whole is an accident (an unmounted volume), never "all checkpoints were deleted".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from stepfs.checkpoints.difference import Difference
from stepfs.checkpoints.formats import Found, Place, look
from stepfs.checkpoints.next_step import NextStep
from stepfs.checkpoints.plausible import HeldBack, Progress
from stepfs.errors import AbsentError, StepfsError, StoreUnreachableError, UsageError, WithdrawnError
from stepfs.format.control import GroupRecord
from stepfs.format.ids import Step
from stepfs.lake.control import Group

_log = logging.getLogger("stepfs.checkpoints")

POLL_S: Final = 1.0
_FAILURES_TOLD: Final = 60
_LAG_S_MAX: Final = 60.0  # how late a file system shows a change (NFS caches a directory for up to 60 s)

Changed = Callable[[GroupRecord | None], None]


@dataclass(eq=False)
class Watch:
    """One node's view of the checkpoints of one group."""

    group: Group
    place: Place
    next_step: NextStep
    changed: Changed = lambda _: None
    look_at: Callable[[], Found] | None = None
    progress: Callable[[], Progress] | None = None  # of the group's readers; checkpoints beyond it are held back

    def __post_init__(self) -> None:
        self._look = self.look_at or partial(look, self.place)
        self._held_back = None if self.progress is None else HeldBack(self.progress)
        self._threads = trio.CapacityLimiter(1)
        self._seen: frozenset[Step] | None = None  # None until the directory could be read once
        self._late: frozenset[Step] = frozenset()  # on disk, but steps that they need are reclaimed
        self._drops_from_s = float("-inf")
        self._missing_since_s: float | None = None
        self._told_counters: set[int] = set()  # logged: they give no step

    async def run(self, *, poll_s: float | None = None) -> None:
        """Look every `poll_s` (`POLL_S`); problems are logged and retried, never fatal to the mount."""
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
            await trio.sleep(POLL_S if poll_s is None else poll_s)

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
        while True:
            difference = self._difference(complete, barred, at_the_end=at_the_end)
            if self._seen is None and not difference.there | barred:
                self._seen = difference.there  # an empty directory proves nothing
                return
            if difference.is_empty:
                return
            try:
                self._seen = await self._record(difference)
            except WithdrawnError as error:
                late = difference.adds & error.late
                if not late:
                    raise
                self._leave_out(late)
            else:
                return

    def _difference(self, complete: frozenset[Step], barred: frozenset[Step], *, at_the_end: bool) -> Difference:
        now_s, seen = trio.current_time(), self._seen or frozenset()
        self._late &= complete | barred
        existing = (complete | (barred & seen)) - self._late  # barred now, but known before: not deleted
        held_back = frozenset[Step]()
        if self._held_back is not None:
            held_back = self._held_back.among(existing, at_the_end=at_the_end)
        adds = existing - held_back
        drops_wait = now_s < self._drops_from_s
        return Difference(
            seen=self._seen,
            there=adds | (existing & seen) | (seen - self._late if drops_wait else frozenset()),
            adds=adds,
            barred=barred,
            drops_wait=drops_wait,
            reconciles=self.group.control.is_unanswered or self._lack_lasts(adds & complete, now_s),
        )

    def _lack_lasts(self, adds: frozenset[Step], now_s: float) -> bool:
        """Whether the record has lacked some of `adds` for longer than another node may see an older directory."""
        record = self.group.known
        if self._seen is None or record is None or adds <= set(record.kept):
            self._missing_since_s = None
            return False
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        return now_s - self._missing_since_s >= _LAG_S_MAX

    async def _record(self, difference: Difference) -> frozenset[Step]:
        """Record the changes since the last look. Returns the base of the next comparison."""
        before: frozenset[Step] = frozenset()

        def apply(kept: frozenset[Step]) -> frozenset[Step]:
            nonlocal before
            before = kept
            return difference.apply(kept)

        opened = self.progress().opened if self.progress is not None else Step(0)
        record = await self.group.revise(
            apply, opened=opened, revives=difference.is_new, fences=difference.seen is None
        )
        self._missing_since_s = None
        if record is not None and frozenset(record.kept) != before:
            _log.info("group %r keeps %s", self.group.name, list(record.kept))
        self.changed(record)
        return difference.seen_next(before)

    def _leave_out(self, late: frozenset[Step]) -> None:
        self._late |= late
        self._drops_from_s = trio.current_time() + _LAG_S_MAX
        known = self._seen or frozenset()
        if late & known:
            _log.info(
                "group %r: the checkpoints at %s were dropped by others, and their steps are reclaimed",
                self.group.name,
                sorted(late & known),
            )
        for step in sorted(late - known):
            _log.warning(
                "group %r: the checkpoint that resumes at step %d is not recorded, because steps that it needs are "
                "reclaimed; training cannot go on from it",
                self.group.name,
                step,
                extra={"step": step},
            )

    def _steps(self, counters: Collection[int], *, told: bool = False) -> frozenset[Step]:
        """The next steps of the counters. Counters that give none are left out; with `told` each is logged once."""
        steps = set()
        for counter in counters:
            try:
                steps.add(self.next_step(counter))
            except UsageError as error:
                if told and counter not in self._told_counters:
                    _log.warning("checkpoint not recorded: %s", error)
                    self._told_counters.add(counter)
        return frozenset(steps)
