"""Which open slices stay pinned: opening is not reading, and a file may stay mapped for hours without being read.

A slice that is being read is pinned, and so are the newest opens: a READ follows most of them within a millisecond, and
pages that were primed for them are read without any READ. The others become *idle*. An idle slice may leave memory,
because the mount's group keeps its object; a READ pins it again. Without a group nothing becomes idle, because the
object of an open file may be deleted at any time (SEMANTICS 7).

Rejected: a time limit alone. A program that maps a thousand files within a second would hold the budget until it ends.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

from stepfs.data.blocks import HeldSlice
from stepfs.format.ids import Step

_STEPS_MAX: Final = 16
_SHARE: Final = 0.25  # of the budget; with the share that prefetching may take, this is all of it
_READING_S: Final = 2.0  # a slice that was read so lately is still being read
_SPARED_MAX: Final = 4  # found reading per call: the cost of an open must not grow with the number of readers


class OpenSlices:
    """The open slices of one mount that are pinned by recency. Plain state, no I/O."""

    def __init__(self) -> None:
        self._recent: OrderedDict[HeldSlice, None] = OrderedDict()  # least recently opened or reading first
        self._steps: Counter[Step] = Counter()  # of `_recent`
        self._bytes = 0  # of `_recent`
        self._newest = Step(0)  # its ranks open it one after another, before they read

    def add(self, held: HeldSlice) -> None:
        self.discard(held)
        self._recent[held] = None
        self._newest = held.entry.step
        self._steps[held.entry.step] += 1
        self._bytes += held.length

    def discard(self, held: HeldSlice) -> None:
        """The slice was closed, or is pinned for good."""
        if held in self._recent:
            del self._recent[held]
            self._bytes -= held.length
            self._steps[held.entry.step] -= 1
            if not self._steps[held.entry.step]:
                del self._steps[held.entry.step]

    def take_idle(self, budget_bytes: int, now: float) -> list[HeldSlice]:
        """Slices without a reader, oldest first. `now` in seconds, as in `HeldSlice.read_at`."""
        found: list[HeldSlice] = []
        spared = 0
        while spared < _SPARED_MAX and self._is_too_much(budget_bytes):
            oldest = next(iter(self._recent))
            if oldest.entry.step == self._newest or _is_being_read(oldest, now):
                self._recent.move_to_end(oldest)
                spared += 1
                continue
            self.discard(oldest)
            found.append(oldest)
        return found

    def _is_too_much(self, budget_bytes: int) -> bool:
        """Ranks that open one large step together are never too much."""
        steps = len(self._steps)
        return steps > _STEPS_MAX or (steps > 1 and self._bytes > _SHARE * budget_bytes)


def _is_being_read(held: HeldSlice, now: float) -> bool:
    return now - held.read_at < _READING_S or any(place is not None and place.waiting for place in held.places)
