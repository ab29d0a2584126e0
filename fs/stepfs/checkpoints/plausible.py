"""Which checkpoints a watcher may believe: their counters are the trainer's, and may be in another unit than steps.

A counter of micro-batches, samples or epochs, or of another run, makes a "next step" that nobody has read up to. Recorded,
it would hide every step of the mount, or let steps go that were never read. So a watcher holds back what lies beyond
the committed steps, and what no reader of the group has reached: a checkpoint that resumes at step 100 was made by a
trainer that had read step 99. Who *says* a number (the command, the hook) means it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from stepfs.format.ids import Step

_log = logging.getLogger("stepfs.checkpoints")

_OTHERS_COMMIT_S: Final = 30.0  # this mount may know less than the one that the trainer reads
_OTHERS_READ_S: Final = (
    900.0  # where nobody reads here, until the mounts with readers have said how far these are
)


@dataclass(frozen=True, slots=True)
class Progress:
    """What one mount knows of its group. `opened` is one past the greatest step that any reader has opened."""

    committed: Step  # number of steps
    opened: Step
    reads_here: bool
    kept: frozenset[Step]

    def doubt(self, step: Step, *, trusts: bool) -> str:
        """Why a checkpoint with this next step should not be recorded; '' if it should."""
        if step in self.kept:
            return ""
        if step > self.committed:
            return f"only {self.committed} steps are committed; is --next-step right, and the directory this run's?"
        if step > self.opened and not trusts:
            return (
                f"no reader of the group has opened step {step - 1} yet; if --next-step is right, mount with "
                "--trust-checkpoints, or record it with `stepfs checkpoint`"
            )
        return ""

    def patience_s(self, step: Step) -> float:
        """How long to hold a doubtful checkpoint back before saying so: others may know better, and record it."""
        if step > self.committed:
            return _OTHERS_COMMIT_S
        return 0.0 if self.reads_here else _OTHERS_READ_S


class HeldBack:
    """The checkpoints that one watcher sees and does not believe, each of which is logged once."""

    def __init__(self, progress: Callable[[], Progress], *, trusts: bool) -> None:
        self._progress = progress
        self._trusts = trusts
        self._since: dict[Step, float] = {}
        self._told: set[Step] = set()

    def among(self, new: frozenset[Step], *, at_the_end: bool = False) -> frozenset[Step]:
        """Which of the checkpoints that are `new` to be recorded must not be. `at_the_end` nobody can know better."""
        progress, now = self._progress(), trio.current_time()
        doubts = {step: doubt for step in new if (doubt := progress.doubt(step, trusts=self._trusts))}
        self._since = {step: self._since.get(step, now) for step in doubts}
        self._told &= set(doubts)
        for step in sorted(doubts.keys() - self._told):
            if at_the_end or now - self._since[step] >= progress.patience_s(step):
                _log.warning(
                    "the checkpoint that resumes at step %d is held back: %s",
                    step,
                    doubts[step],
                    extra={"step": step},
                )
                self._told.add(step)
        return frozenset(doubts)
