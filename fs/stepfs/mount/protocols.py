"""The mount's needs of the rooms below it, as small protocols, so that its tests need no store and no cache."""

from __future__ import annotations

from typing import Protocol

from stepfs.format.ids import SliceIndex
from stepfs.format.snapshot import StepEntry


class SliceHandle(Protocol):
    """An open slice. Its bytes stay readable until `close`, even if the step is reclaimed meanwhile."""

    @property
    def length(self) -> int: ...

    async def read(self, offset: int, size: int) -> memoryview:
        """Exactly the committed bytes [offset, min(offset + size, length)), verified, as one contiguous buffer."""
        ...

    def close(self) -> None: ...


class Slices(Protocol):
    """`stepfs.data.reads.SliceReads`."""

    def open(self, entry: StepEntry, index: SliceIndex) -> SliceHandle: ...
