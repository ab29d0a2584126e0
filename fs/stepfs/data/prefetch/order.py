"""Whether readers go through the lake in order. Slices fetched ahead of a reader that jumps are wasted.

Map-style datasets with `shuffle=True` open steps all over the lake. Between 256 remembered steps of a lake of a few
thousand there are small gaps everywhere, so nearness alone proves nothing. Three things do:
* the steps opened last in a run lie close together, and were opened one soon after another;
* readers did go on from where they were lately (`OrderEvidence`), more often than by chance. Then a run of few steps
  counts too: many readers that take turns look like jumps for a whole round;
* a dense run that covers a small part of the lake is a shuffle window that moves through it.
Where reading usually begins, fewer steps do as long as nothing has jumped yet.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stepfs.format.ids import SliceIndex, Step

EVIDENCE_STEPS: Final = 8  # the slices of a step are learned from so many steps of a run
_SAMPLES: Final = 16  # steps judged
_TRUST_SHARE: Final = 0.75  # of them went on from an opened step
_CHANCE_MAX: Final = 0.4  # were they drawn at random, at most so many would
_NEXT_STEPS: Final = 2  # a step so little above an opened one goes on from it …
_MEMORY_STEPS: Final = 128  # … if that was opened at most so many steps ago
_CLOSE_SHARE: Final = 0.75  # of the steps opened last must be close together …
_CLOSE_FACTOR: Final = 2  # … within so many times as many places
_SURE_STEPS: Final = 8  # so many close steps are no accident …
_SOON_STEPS: Final = 32  # … if they were opened while at most so many others were
_START_STEPS: Final = 16  # reading begins at the first step, or so little behind it
_WINDOW_FILL: Final = 0.6
_WINDOW_SHARE: Final = 0.5  # of the lake


@dataclass(frozen=True, slots=True)
class AccessRun:
    """Readers that are near each other."""

    steps: tuple[Step, ...]  # recently opened, ascending
    indices: frozenset[SliceIndex]  # the slices expected to be opened in each step
    stride: int
    latest: tuple[Step, ...] = ()  # some of `steps`, opened last first
    age_steps: int = 0  # distinct steps opened since the oldest of `latest`

    @property
    def low(self) -> Step:
        return self.steps[0]

    @property
    def high(self) -> Step:
        return self.steps[-1]


def usual_slices(opened: Sequence[Collection[SliceIndex]]) -> frozenset[SliceIndex]:
    """The slices that readers open of a step, from those opened of each of the latest steps.

    Once there is evidence, one look at all files of one step (a checksum, a copy) teaches nothing.
    """
    enough = 1 if len(opened) < EVIDENCE_STEPS // 2 else 2
    times = Counter(itertools.chain.from_iterable(opened))
    return frozenset(index for index, count in times.items() if count >= enough)


class OrderEvidence:
    """How often a step that was opened for the first time went on from another."""

    def __init__(self) -> None:
        self._went_on: deque[bool] = deque(maxlen=_SAMPLES)
        self._recent: deque[Step] = deque(maxlen=_MEMORY_STEPS)

    def note(self, step: Step) -> None:
        """A step is opened that was not opened lately. The first one of all proves nothing."""
        if self._recent:
            self._went_on.append(any(0 < step - other <= _NEXT_STEPS for other in self._recent))
        self._recent.append(step)

    def trusts(self, steps: int) -> bool:
        """Whether readers will go on from a step, in a lake of so many steps."""
        chance = _NEXT_STEPS * len(self._recent) / max(1, steps)
        enough = _TRUST_SHARE * len(self._went_on)
        return bool(self._went_on) and chance <= _CHANCE_MAX and sum(self._went_on) >= enough

    @property
    def goes_on(self) -> bool:
        """Whether the step opened last did, or is the first."""
        return not self._went_on or self._went_on[-1]

    @property
    def unbroken(self) -> bool:
        """Whether nothing has jumped, as far as is remembered."""
        return all(self._went_on)


def ordered_runs(runs: Sequence[AccessRun], evidence: OrderEvidence, *, first: Step, frontier: Step) -> list[AccessRun]:
    """The runs that readers will continue; [first, frontier] are the steps that they may open."""
    trusted = evidence.trusts(frontier - first + 1)
    found = []
    for run in runs:
        places = (run.high - run.low) // run.stride + 1
        is_dense = len(run.latest) >= _SURE_STEPS and len(run.steps) >= _WINDOW_FILL * places
        begins = evidence.unbroken and run.low - first < _START_STEPS
        if len(run.latest) == 1:
            if trusted or begins:
                found.append(run)
        elif (low := _close_from(run)) is not None:
            sure = len(run.latest) >= _SURE_STEPS and run.age_steps <= _SOON_STEPS
            if trusted or sure or begins:
                found.append(run if is_dense else _without_strays(run, low))
        elif is_dense and run.high - run.low <= _WINDOW_SHARE * (frontier - first):
            found.append(run)
    return found


def _close_from(run: AccessRun) -> Step | None:
    """Where most of the steps opened last begin, if they lie within a stretch of twice as many places."""
    steps = sorted(run.latest)
    most = math.ceil(_CLOSE_SHARE * len(steps))
    span, low = min((high - low, low) for low, high in zip(steps, steps[most - 1 :], strict=False))
    return low if span < _CLOSE_FACTOR * most * run.stride else None


def _without_strays(run: AccessRun, low: Step) -> AccessRun:
    """The steps below are not filled up: another reader jumped there."""
    return replace(run, steps=tuple(step for step in run.steps if step >= low))
