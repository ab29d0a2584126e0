"""Memory for blocks: leased, reused, counted against one limit.

A buffer is reused when nothing refers to its memory any more; given back too early, it waits among the `lingering`,
still counted (DESIGN.md).
"""

import mmap
import sys
from contextlib import suppress
from typing import Final

MAPPED_BYTES_MIN: Final = 1 << 20  # below, the allocator's: the kernel limits the number of mappings
_UNSHARED: Final = 2  # references to `memory` when only its Buffer holds it: the attribute and the argument


class Buffer:
    """`size` usable bytes; `capacity` of them are charged."""

    __slots__ = ("capacity", "memory", "size")

    def __init__(self, size: int, capacity: int) -> None:
        self.size = size
        self.capacity = capacity
        self.memory: mmap.mmap | bytearray
        if capacity < MAPPED_BYTES_MIN:
            self.memory = bytearray(capacity)
        else:
            self.memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without them
                self.memory.madvise(mmap.MADV_HUGEPAGE)

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """A window of the usable bytes; keeps the buffer from being reused as long as it lives."""
        return memoryview(self.memory)[start : self.size if stop is None else stop]

    @property
    def exposed(self) -> bool:
        """Whether another reader or thread may still see or write the memory."""
        return sys.getrefcount(self.memory) > _UNSHARED


def size_class(size: int) -> int:
    """Bytes charged for a buffer of `size` bytes: at most an eighth more, so that steps reuse each other's."""
    if size < MAPPED_BYTES_MIN:
        return size
    grain = 1 << (size.bit_length() - 4)
    return -(-size // grain) * grain


class Pool:
    """The buffers of one mount under one limit: `used + pooled ≤ limit`, always.

    `used` counts leased and lingering buffers and bytes charged by others (`charge`: primed pages).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.pooled = 0
        self.refused = False  # by the system, the last time
        self._free: dict[int, list[Buffer]] = {}
        self._lingering: list[Buffer] = []

    @property
    def lingering(self) -> bool:
        """Whether released memory is still visible to a reader."""
        return bool(self._lingering)

    def take(self, size: int) -> Buffer | None:
        """Lease a buffer; None when it does not fit, or the system has no memory: evict something, or wait."""
        self.sweep()
        capacity = size_class(size)
        kept = self._free.get(capacity)
        if kept and self.used + capacity <= self.limit:
            buffer = self._pop(capacity)
            buffer.size = size
        else:
            if not self._make_room(capacity):
                return None
            try:
                buffer = Buffer(size, capacity)
            except (OSError, MemoryError):  # overcommit or RLIMIT_AS end before our own limit
                self._free.clear()
                self.pooled = 0
                self.refused = True
                return None
        self.refused = False
        self.used += capacity
        return buffer

    def give(self, buffer: Buffer) -> None:
        """End a lease. The memory is reused once no reader sees it."""
        if buffer.exposed:
            self._lingering.append(buffer)
        else:
            self._keep(buffer)

    def write_off(self, buffer: Buffer) -> None:
        """End a lease for good: a thread that may never end has the memory, which is not ours to reuse."""
        self.used -= buffer.capacity

    def charge(self, size: int) -> bool:
        """Count bytes held elsewhere (the page cache) against the limit; False when they do not fit."""
        self.sweep()
        if not self._make_room(size):
            return False
        self.used += size
        return True

    def discharge(self, size: int) -> None:
        self.used -= size
        assert self.used >= 0

    def set_limit(self, limit: int) -> int:
        """Change the limit; frees pooled memory first. Returns the bytes that the owner must still evict."""
        self.limit = limit
        self.sweep()
        self._make_room(0)
        return max(0, self.used - limit)

    def _make_room(self, capacity: int) -> bool:
        while self._free and self.used + self.pooled + capacity > self.limit:
            self._pop(max(self._free))
        return self.used + capacity <= self.limit

    def _pop(self, capacity: int) -> Buffer:
        kept = self._free[capacity]
        buffer = kept.pop()
        if not kept:
            del self._free[capacity]
        self.pooled -= capacity
        return buffer

    def _keep(self, buffer: Buffer) -> None:
        self.used -= buffer.capacity
        if buffer.capacity >= MAPPED_BYTES_MIN and self.used + self.pooled + buffer.capacity <= self.limit:
            self._free.setdefault(buffer.capacity, []).append(buffer)
            self.pooled += buffer.capacity

    def sweep(self) -> None:
        """Reuse released memory that no reader sees any more."""
        if self._lingering:
            lingering, self._lingering = self._lingering, []
            for buffer in lingering:
                self.give(buffer)
