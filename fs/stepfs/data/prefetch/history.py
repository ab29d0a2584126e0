"""The places of this node's readers, from their opens alone. Plain state, no I/O, no clock.

Rejected: "the last opened step" and per-descriptor read-ahead. Forked DataLoader workers, several ranks, shuffled
windows and a validation job beside the training all make the order of opens look random, while the *set* of recently
opened steps stays one or a few dense runs. So: runs of recently opened steps (gaps up to `GAP_STEPS` belong to a run),
each with the slices opened in it and the stride of its steps.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final

from stepfs.data.prefetch.order import EVIDENCE_STEPS, AccessRun, OrderEvidence, usual_slices
from stepfs.format.ids import SliceIndex, Step

RECENT_STEPS: Final = 256  # distinct steps remembered; a shuffle window up to this size is understood
LIVE_STEPS: Final = 48  # a run not touched during so many other steps has no reader any more …
_LIVE_ROUNDS: Final = 2  # … nor during so many steps of every run, where many readers take turns
GAP_STEPS: Final = 16
_PASS_STEPS: Final = 24  # reopening a file this many distinct steps later is a new pass over the data


class AccessHistory:
    """The recently opened files of one mount."""

    def __init__(self) -> None:
        # Least recently touched first.
        self._opened: OrderedDict[Step, dict[SliceIndex, None]] = OrderedDict()
        self.order = OrderEvidence()

    def note(self, step: Step, index: SliceIndex) -> bool:
        """A file was opened; True if this is a step not opened lately (the readers moved)."""
        seen = self._opened.get(step)
        if seen is not None and index in seen and self._is_new_pass(step):
            for _ in range(max(0, len(self._opened) - _PASS_STEPS)):
                self._opened.popitem(last=False)
            seen = self._opened.get(step)
        if seen is None:
            self.order.note(step)
            seen = self._opened[step] = {}
            fresh = True
        else:
            fresh = False
        seen[index] = None
        self._opened.move_to_end(step)
        if len(self._opened) > RECENT_STEPS:
            self._opened.popitem(last=False)
        return fresh

    def opened(self, step: Step) -> Collection[SliceIndex]:
        """Slices of a step that were opened lately: no need to fetch them ahead."""
        return self._opened.get(step, {}).keys()

    def forget_below(self, step: Step) -> None:
        for old in [old for old in self._opened if old < step]:
            del self._opened[old]

    def runs(self) -> list[AccessRun]:
        """The runs that still have a reader, lowest first."""
        by_recency = list(reversed(self._opened))
        recency = {step: rank for rank, step in enumerate(by_recency)}
        found: list[list[Step]] = []
        for step in sorted(self._opened):
            if found and step - found[-1][-1] <= GAP_STEPS:
                found[-1].append(step)
            else:
                found.append([step])
        live = set(by_recency[: max(LIVE_STEPS, _LIVE_ROUNDS * len(found))])
        return [self._run(steps, recency) for steps in found if not live.isdisjoint(steps)]

    def _run(self, steps: Sequence[Step], recency: dict[Step, int]) -> AccessRun:
        latest = sorted(steps, key=recency.__getitem__)[:EVIDENCE_STEPS]
        indices = usual_slices([self._opened[step] for step in latest])
        strides = math.gcd(*(step - steps[0] for step in steps[1:]))
        stride = strides if len(steps) >= EVIDENCE_STEPS // 2 else 1
        return AccessRun(tuple(steps), indices, stride, tuple(latest), recency[latest[-1]])

    def _is_new_pass(self, step: Step) -> bool:
        latest = list(itertools.islice(reversed(self._opened), _PASS_STEPS))
        return step not in latest
