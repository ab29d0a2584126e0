"""Following a checkpoint directory: new checkpoints are recorded, vanished ones dropped.

Only checkpoints that this mount saw vanish are dropped, never one that is merely on record, and never all of a directory
that vanished. One beyond the committed steps, or beyond those that readers here have opened, is held back.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

import trio

from stepfs.checkpoints.formats import Found, NextStep, Place, look
from stepfs.checkpoints.record import breaks_order
from stepfs.errors import AbsentError, StepfsError, StoreUnreachableError, UsageError, WithdrawnError
from stepfs.format.control import GroupRecord
from stepfs.format.ids import INTEGER_MAX, Step
from stepfs.lake.control import Group

_log = logging.getLogger("stepfs.checkpoints")

POLL_S: Final = 1.0
_FAILURES_TOLD: Final = 60
_COMMIT_S: Final = 30.0  # this mount may see a commit later than the trainer that has read it elsewhere
_UNKNOWN_S: Final = 60.0  # something else than checkpoints may come first
_FIRST_READ_S: Final = 900.0  # a trainer may load its model for so long before it reads

Changed = Callable[[GroupRecord | None], None]
Decide = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the mount knows of the lake and of its readers. `opened` is one past the greatest step opened here."""

    committed: Step  # number of steps
    opened: Step
    order_needs_from: Step | None = None  # first step of the shuffled epoch that readers here are in
    astray: str = ""  # why readers here have had steps that the lake has lost

    def doubt(self, step: Step) -> str:
        """Why a checkpoint with this next step should not be recorded; '' if it should."""
        if why := self.astray or breaks_order(step, self.order_needs_from):
            return why
        if step > self.committed:
            return f"only {self.committed} steps are committed; is --next-step right, and the directory this run's?"
        if step > self.opened:
            return (
                f"no reader of this mount has opened step {step - 1} yet; if --next-step is right, record it with "
                "`stepfs checkpoint`"
            )
        return ""

    def patience_s(self, step: Step) -> float:
        """Seconds before a doubt is logged."""
        if step > self.committed:
            return _COMMIT_S
        return 0.0 if self.opened or breaks_order(step, self.order_needs_from) else _FIRST_READ_S


@dataclass(frozen=True, slots=True)
class WatchState:
    """What the next daemon of a mount goes on from, in values of JSON. Without it, what was recorded by hand beside the
    directory would be dropped, and what is held back for good recorded.
    """

    of: str = ""  # the place, and the meaning of its counters
    seen: list[int] | None = None
    out_of_order: dict[str, str] = field(default_factory=dict)  # reasons by step
    told_late: list[int] = field(default_factory=list)
    told_counters: list[int] = field(default_factory=list)
    told_doubts: list[int] = field(default_factory=list)
    told_unknown: bool = False


def _is_step(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(INTEGER_MAX))


@dataclass(eq=False)
class Watch:
    """One mount's view of the checkpoints of its group."""

    group: Group
    place: Place
    next_step: NextStep
    changed: Changed = lambda _: None
    look_at: Callable[[], Found] | None = None
    progress: Callable[[], Progress] | None = None  # without it nothing is held back
    decide: Decide = lambda _: None  # puts a `WatchState` on record

    def __post_init__(self) -> None:
        self._look = self.look_at or partial(look, self.place)
        self._threads = trio.CapacityLimiter(1)
        self._seen: frozenset[Step] | None = None  # by the last look; None until one found something
        self._told_late: frozenset[Step] = frozenset()
        self._told_counters: set[int] = set()  # they give no step
        self._unknown_since = float("inf")  # the directory holds other things
        self._told_unknown = False
        self._doubted_since: dict[Step, float] = {}
        self._told_doubts: set[Step] = set()
        self._out_of_order: dict[Step, str] = {}  # reasons, which the end of the epoch does not change
        self._of = f"{self.place.directory} {self.place.pattern or ''} {self.next_step.text}"
        self._decided = WatchState(self._of)
        self.rests = False  # another process looks

    def inherit(self, state: WatchState) -> None:
        """Go on as the daemon before would have, which followed the same group; of another place it has seen nothing."""
        self._out_of_order = {Step(int(step)): why for step, why in state.out_of_order.items() if _is_step(step)}
        if state.of != self._of:
            return
        self._seen = None if state.seen is None else frozenset(map(Step, state.seen))
        self._told_late = frozenset(map(Step, state.told_late))
        self._told_counters, self._told_doubts = set(state.told_counters), set(map(Step, state.told_doubts))
        self._told_unknown = state.told_unknown
        self._decided = state

    def _decide(self) -> None:
        state = WatchState(
            self._of,
            None if self._seen is None else sorted(self._seen),
            {str(step): why for step, why in sorted(self._out_of_order.items())},
            sorted(self._told_late),
            sorted(self._told_counters),
            sorted(self._told_doubts),
            self._told_unknown,
        )
        if state != self._decided:
            self._decided = state
            self.decide(asdict(state))

    async def run(self, *, poll_s: float | None = None) -> None:
        """Look every `poll_s` (`POLL_S`); problems are logged and retried, never fatal to the mount."""
        warned = ""
        failures = 0  # in a row
        while True:
            try:
                if not self.rests:
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
        """Record what the directory shows and the group's record lacks, and what has vanished since the last look."""
        try:
            # A hanging file system must not keep the mount from ending; at most one thread may hang in it.
            found = await trio.to_thread.run_sync(self._look, abandon_on_cancel=True, limiter=self._threads)
        except OSError as error:
            # The trainer deletes an old one meanwhile, or a network file system fails briefly. Repeat the whole look:
            # a look without the unreadable entries would drop a checkpoint that exists.
            raise StoreUnreachableError(f"cannot read the checkpoints: {error}") from error
        self._note_layout(found, at_the_end=at_the_end)
        complete, barred = self._steps(found.complete, told=True), self._steps(found.barred)
        try:
            await self._record(complete, barred, at_the_end=at_the_end)
        except WithdrawnError:  # the lake is known better now: once more without what comes too late
            await self._record(complete, barred, at_the_end=at_the_end)

    def _note_layout(self, found: Found, *, at_the_end: bool) -> None:
        """Say once that the directory holds other things than checkpoints."""
        now = trio.current_time()
        why = found.unknown_layout(self.place)
        self._unknown_since = min(self._unknown_since, now) if why else float("inf")
        if why and not self._told_unknown and (at_the_end or now - self._unknown_since >= _UNKNOWN_S):
            self._told_unknown = True
            _log.warning("nothing is recorded: %s", why)

    async def _record(self, complete: frozenset[Step], barred: frozenset[Step], *, at_the_end: bool) -> None:
        seen, record = self._seen, self.group.known
        before = frozenset(() if record is None else record.kept)
        there = self._in_time(complete | (barred & before))  # what is barred now, and on record, is not deleted
        there -= self._doubtful(there - before, at_the_end=at_the_end)
        self._decide()  # before the others are recorded
        if seen is None and not there:
            return  # an empty directory proves nothing: the run may not have written its first checkpoint yet
        new, gone = (there, frozenset[Step]()) if seen is None else (there - seen, seen - there)

        def change(kept: frozenset[Step]) -> frozenset[Step]:
            return there if seen is None else (kept | there) - gone

        # A retired group comes back for a new checkpoint alone.
        if new if record is None else change(before) != before or self.group.control.is_unanswered:
            after = await self.group.revise(change, revives=bool(new))
            if after is not None and frozenset(after.kept) != before:
                _log.info("group %r keeps %s", self.group.name, list(after.kept))
            self.changed(after)
        self._seen = there
        self._decide()

    def _in_time(self, steps: frozenset[Step]) -> frozenset[Step]:
        """Those whose steps are not reclaimed; the others are left out, each logged once."""
        late = frozenset(step for step in steps if step < self.group.control.first_live_step)
        for step in sorted(late - self._told_late - (self._seen or frozenset())):
            _log.warning(
                "group %r: the checkpoint that resumes at step %d is not recorded, because steps that it needs are "
                "reclaimed; training cannot go on from it",
                self.group.name,
                step,
                extra={"step": step},
            )
        self._told_late = late
        return steps - late

    def _doubtful(self, new: frozenset[Step], *, at_the_end: bool) -> frozenset[Step]:
        """Those that are held back, each logged once. `at_the_end`: nothing will change any more."""
        if self.progress is None:
            return frozenset()
        progress, now = self.progress(), trio.current_time()
        doubts = {step: doubt for step in new if (doubt := progress.doubt(step))}
        order = progress.order_needs_from
        self._out_of_order |= {step: why for step, why in doubts.items() if breaks_order(step, order)}
        doubts |= {step: why for step, why in self._out_of_order.items() if step in new}
        self._doubted_since = {step: self._doubted_since.get(step, now) for step in doubts}
        self._told_doubts &= set(doubts)
        for step in sorted(doubts.keys() - self._told_doubts):
            if at_the_end or now - self._doubted_since[step] >= progress.patience_s(step):
                message = "the checkpoint that resumes at step %d is held back: %s"
                _log.warning(message, step, doubts[step], extra={"step": step})
                self._told_doubts.add(step)
        return frozenset(doubts)

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
