"""Plausibility of watched checkpoints: their counters are the trainer's, and may count something else than steps.

A counter of micro-batches, samples or epochs, or of another run, gives a "next step" that no reader has reached. If it
were recorded, the mount would hide all its steps, or steps would be deleted unread. So a watcher holds back
checkpoints beyond the committed steps, and those that no reader of the group has reached: a trainer that made a
checkpoint to resume at step 100 has read step 99. A number that a user gives (by the command or the hook) is accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from stepfs.format.ids import Step

_log = logging.getLogger("stepfs.checkpoints")

_OTHERS_COMMIT_S: Final = 30.0  # this mount may lag behind the mount that the trainer reads
_OTHERS_READ_S: Final = 900.0  # without readers here: until mounts with readers have recorded their progress


@dataclass(frozen=True, slots=True)
class Progress:
    """One mount's knowledge of its group. `opened` is one past the greatest step that any reader has opened."""

    committed: Step  # number of steps
    opened: Step
    reads_here: bool
    kept: frozenset[Step]
    order_needs_from: Step | None = None  # first step of the shuffled epoch that readers here are in

    def doubt(self, step: Step) -> str:
        """Why a checkpoint with this next step should not be recorded; '' if it should."""
        if step in self.kept:
            return ""
        if why := breaks_order(step, self.order_needs_from):
            return why
        if step > self.committed:
            return f"only {self.committed} steps are committed; is --next-step right, and the directory this run's?"
        if step > self.opened:
            return (
                f"no reader of the group has opened step {step - 1} yet; if --next-step is right, record it with "
                "`stepfs checkpoint`"
            )
        return ""

    def breaks_order(self, step: Step) -> bool:
        """Whether the checkpoint lies inside a shuffled epoch and would release steps that the epoch needs."""
        return step not in self.kept and breaks_order(step, self.order_needs_from) != ""

    def patience_s(self, step: Step) -> float:
        """Seconds before a doubtful checkpoint is logged: another mount may know more and record it."""
        if step > self.committed:
            return _OTHERS_COMMIT_S
        return 0.0 if self.reads_here or self.breaks_order(step) else _OTHERS_READ_S


def breaks_order(step: int, needed: int | None) -> str:
    """Why a checkpoint inside a shuffled epoch that needs its steps from `needed` on is not recorded; '' if it may be."""
    if needed is None or step <= needed:
        return ""
    return (
        f"NEXT {step}: readers go through the steps from {needed} on in a shuffled order, and a checkpoint in the middle of "
        f"it needs all of them: record {needed} (`ShuffledSteps.next_step`) until the epoch has ended. An order that "
        "nobody follows any more is taken back with `ShuffledSteps.set_epoch`, or on a mount with "
        "`stepfs.announce.announce_none(DIR)`"
    )


class HeldBack:
    """The implausible checkpoints of one watcher, each of which is logged once."""

    def __init__(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress
        self._since: dict[Step, float] = {}
        self._told: set[Step] = set()
        self._out_of_order: dict[Step, str] = {}  # reasons, which the end of the epoch does not change

    def among(self, new: frozenset[Step], *, at_the_end: bool = False) -> frozenset[Step]:
        """The checkpoints among `new` that must not be recorded. `at_the_end`: no other mount will later."""
        progress, now = self._progress(), trio.current_time()
        doubts = {step: doubt for step in new if (doubt := progress.doubt(step))}
        self._out_of_order |= {step: doubts[step] for step in doubts if progress.breaks_order(step)}
        doubts |= {step: why for step, why in self._out_of_order.items() if step in new}
        self._since = {step: self._since.get(step, now) for step in doubts}
        self._told &= set(doubts)
        for step in sorted(doubts.keys() - self._told):
            if at_the_end or now - self._since[step] >= progress.patience_s(step):
                message = "the checkpoint that resumes at step %d is held back: %s"
                _log.warning(message, step, doubts[step], extra={"step": step})
                self._told.add(step)
        return frozenset(doubts)
