"""The step directories that the kernel holds, so that exactly their names are withdrawn when steps leave the view.

Lookup counts in chunked arrays: 4 bytes per directory that the kernel knows, none for those that it forgot. A dict of
10⁶ counts would take 100 MB. Other inodes are not counted: they are pure functions of their names, and dropping a
directory's name drops everything below it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

from stepfs.format.ids import Step

_CHUNK_BITS: Final = 12
_CHUNK_STEPS: Final = 1 << _CHUNK_BITS


class LookupCounts:
    """Lookup counts of step directories."""

    def __init__(self) -> None:
        self._chunks: dict[int, array[int]] = {}
        self._used: dict[int, int] = {}

    def add(self, step: Step) -> None:
        """Count one more reference of the kernel to the directory (LOOKUP, or an entry of READDIRPLUS)."""
        self.add_range(step, Step(step + 1))

    def add_range(self, first: Step, end: Step) -> None:
        while first < end:
            number, offset = divmod(first, _CHUNK_STEPS)
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = self._chunks[number] = array("I", bytes(4 * _CHUNK_STEPS))
                self._used[number] = 0
            stop = min(_CHUNK_STEPS, offset + end - first)
            counts = chunk[offset:stop]
            self._used[number] += counts.count(0)
            chunk[offset:stop] = array("I", [count + 1 for count in counts])
            first = Step(first + stop - offset)

    def forget(self, step: Step, count: int) -> None:
        number, offset = divmod(step, _CHUNK_STEPS)
        chunk = self._chunks.get(number)
        if chunk is None or not chunk[offset]:
            return
        chunk[offset] = max(0, chunk[offset] - count)
        if not chunk[offset]:
            self._used[number] -= 1
            if not self._used[number]:
                del self._chunks[number], self._used[number]

    def between(self, first: Step, end: Step) -> Iterator[Step]:
        """Known steps in [first, end), ascending; a snapshot per chunk, so `forget` may run meanwhile."""
        for number in sorted(self._chunks):
            base = number << _CHUNK_BITS
            if base >= end or base + _CHUNK_STEPS <= first:
                continue
            chunk = self._chunks.get(number)
            if chunk is None:
                continue
            for offset in range(max(0, first - base), min(_CHUNK_STEPS, end - base)):
                if chunk[offset]:
                    yield Step(base + offset)

    def __len__(self) -> int:
        return sum(self._used.values())
