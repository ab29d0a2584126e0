"""One open of a slice: the object behind a file descriptor of the mount.

Holds no bytes and no position: forked DataLoader workers share descriptors, so everything learned from reads belongs
to the slice.
"""

from __future__ import annotations

from typing import Protocol

import trio

from stepfs.data.blocks import HeldSlice
from stepfs.data.counters import DataCounts
from stepfs.errors import StoreUnreachableError
from stepfs.format.ids import BLOCK_BYTES


class Source(Protocol):
    """`stepfs.data.reads.SliceReads`."""

    @property
    def deadline_s(self) -> float: ...
    @property
    def counts(self) -> DataCounts: ...
    def begin_reading(self, held: HeldSlice) -> None: ...
    def move_to(self, held: HeldSlice, number: int) -> None: ...
    async def ready_block(self, held: HeldSlice, number: int) -> None: ...
    def close(self, held: HeldSlice) -> None: ...


class SliceHandle:
    """One open of a slice: keeps its bytes in memory until `close`."""

    __slots__ = ("_closed", "_held", "_source", "_unread", "length")

    def __init__(self, source: Source, held: HeldSlice) -> None:
        self._source = source
        self._held = held
        self._closed = False
        self._unread = True
        self.length = held.length

    async def read(self, offset: int, size: int) -> memoryview:
        """Bytes [offset, offset + size), fewer only at the end: verified, never a mixture.

        Waits for the blocks it needs. `CorruptError` or `AbsentError` name the object; `StoreUnreachableError` once
        the store did not deliver within the deadline.
        """
        assert not self._closed
        stop = min(offset + size, self.length)
        if offset >= stop:
            return memoryview(b"")
        if self._unread or not self._held.role.pinned:
            self._unread = False
            self._source.begin_reading(self._held)
        self._held.read_at = trio.current_time()
        number, start = divmod(offset, BLOCK_BYTES)
        if number != self._held.reading:
            self._source.move_to(self._held, number)
        if start + size <= BLOCK_BYTES and self._held.is_ready(number):  # the common case, without a timer
            self._source.counts.bytes_delivered += stop - offset
            return self._held.window(number, start, start + stop - offset)
        began = trio.current_time()
        try:
            with trio.move_on_after(self._source.deadline_s):
                view = await self._window(offset, stop)
                self._source.counts.bytes_delivered += len(view)
                return view
        finally:
            self._source.counts.wait_seconds.observe(trio.current_time() - began)
        raise StoreUnreachableError(
            f"{self._held.entry.tgb.key}: the store did not deliver step {self._held.entry.step} "
            f"within {self._source.deadline_s:g} s; check it, the read may be repeated"
        )

    async def _window(self, offset: int, stop: int) -> memoryview:
        first, last = offset // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if first == last:
            await self._source.ready_block(self._held, first)
            return self._held.window(first, offset - first * BLOCK_BYTES, stop - first * BLOCK_BYTES)
        joined = bytearray()  # copied at once: a view held meanwhile keeps memory from the block awaited
        for number in range(first, last + 1):
            await self._source.ready_block(self._held, number)
            base = number * BLOCK_BYTES
            joined += self._held.window(number, max(offset - base, 0), min(stop - base, BLOCK_BYTES))
        return memoryview(joined)

    def close(self) -> None:
        """Let the bytes go when room is needed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._source.close(self._held)
