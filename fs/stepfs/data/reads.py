"""Open slices: fetched whole, served block by verified block, pinned until closed.

`open` never waits: it pins the slice and requests it. A read waits for the one block that it needs. Requests of one
turn of the loop are planned together, so that eight ranks opening eight neighbours cost one GET. Between two
awaits `ready_block` waits only on `Block.settled` and for the next plan. After either the block may have been evicted
again, so it checks again; the caller uses the block before its next await.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio

from stepfs.data.blocks import HeldSlice, State
from stepfs.data.cache.memory import Cache
from stepfs.data.cache.opened import OpenSlices
from stepfs.data.cache.write_behind import WriteBehind
from stepfs.data.counters import DataCounts
from stepfs.data.loading import BlockLoader
from stepfs.data.protocols import Priming
from stepfs.data.queue import FetchQueue
from stepfs.data.roles import Role
from stepfs.errors import StoreUnreachableError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, SliceKey, Step
from stepfs.format.snapshot import StepEntry

_CLOSED_MAX: Final = 4096  # slices with a reader behind that are remembered


@dataclass(eq=False, kw_only=True)
class SliceReads:
    """The open slices of one mount."""

    cache: Cache
    disk_copies: WriteBehind
    queue: FetchQueue
    loader: BlockLoader
    priming: Callable[[], Priming]
    counts: DataCounts
    deadline_s: float
    opened_are_kept: bool
    peers: int = 1  # readers of each slice
    opens: int = 0
    opened_bytes: int = 0
    on_reading: Callable[[Step, SliceIndex], None] = lambda _step, _index: None

    def __post_init__(self) -> None:
        self._recent = OpenSlices()
        self._closes: OrderedDict[SliceKey, int] = OrderedDict()  # of slices that another reader has yet to open

    @property
    def slice_bytes(self) -> int:
        """Mean length of the slices opened so far, 0 before the first."""
        return self.opened_bytes // max(1, self.opens)

    def open(self, entry: StepEntry, index: SliceIndex) -> SliceHandle:
        """Open a slice. Never waits. IndexError beyond the last slice.

        A missing slice is fetched at its first READ; at once if the store may lose the object before that.
        """
        held = self.cache.hold(entry, index)
        held.handles += 1
        self._pin(held)
        self.opens += 1
        self.opened_bytes += held.length
        primed = self._is_primed(held)
        if held.ready or self.disk_copies.holds(held) or primed:
            self.counts.hits += 1  # on disk: loaded when it is read, unless primed pages serve the reader
        else:
            self.counts.misses += 1
            if not self._is_kept(held):
                self._demand(held)
        if primed:
            self._note_reading(held)  # the page cache serves it: no READ will arrive
        if self._is_kept(held):
            self._recent.add(held)
            self.make_idle()
        return SliceHandle(self, held)

    def begin_reading(self, held: HeldSlice) -> None:
        """The first READ of a handle, or the first after it was idle."""
        self._note_reading(held)
        self._pin(held)
        if self._is_kept(held):
            self._recent.add(held)
        if held.missing and not self.disk_copies.holds(held) and not self._is_primed(held):
            self._demand(held)

    def move_to(self, held: HeldSlice, number: int) -> None:
        """A reader came to another block: the blocks that it passed may make room for its next ones."""
        held.move_to(number)
        self.loader.notify()

    async def ready_block(self, held: HeldSlice, number: int) -> None:
        """Return once block `number` is READY; the caller uses it before its next await."""
        while True:
            block = held.places[number]
            if block is None:
                held.reading = number  # a slice that was passed is fetched from this block on
                self._demand(held)
                await self.loader.planned.wait()
                continue
            if block.state is State.READY:
                block.read_at = trio.current_time()
                return
            block.waiting += 1
            self.loader.readers_waiting += 1
            self.loader.notify()
            try:
                await block.settled.wait()
            finally:
                block.waiting -= 1
                self.loader.readers_waiting -= 1
                self.loader.notify()  # the block may make room for another reader now
            if block.error is not None and not isinstance(block.error, StoreUnreachableError):
                raise type(block.error)(*block.error.args)  # a fresh one: its traceback is this reader's

    def close(self, held: HeldSlice) -> None:
        held.handles -= 1
        awaited = self._note_close(held.key)
        if held.handles:
            return
        self._recent.discard(held)
        kept = awaited and not self._is_primed(held)  # its pages are enough for a peer
        self.cache.set_role(held, Role.AWAITED if kept else Role.CONSUMED)
        self.disk_copies.unpinned(held, consumed=not awaited)
        self.queue.closed(held)
        self.priming().closed(held.key, awaited=awaited)
        self.loader.notify()

    def _note_close(self, key: SliceKey) -> bool:
        """Count a close; True if another reader of the slice has yet to open it."""
        closes = self._closes.pop(key, 0) + 1
        if closes >= self.peers:
            return False
        self._closes[key] = closes
        if len(self._closes) > _CLOSED_MAX:
            self._closes.popitem(last=False)
        return True

    def make_idle(self) -> None:
        """Let open slices without a reader leave memory."""
        for held in self._recent.take_idle(self.cache.pool.limit, trio.current_time()):
            self.cache.set_role(held, Role.IDLE)
            self.disk_copies.unpinned(held, consumed=True)
            self.priming().idle(held.key)
            self.loader.notify()

    def keep_opened(self) -> None:
        """The store no longer keeps the objects of open files: hold their bytes from now on."""
        self.opened_are_kept = False
        self.hold(self.cache.opened())

    def hold(self, opened: Iterable[HeldSlice]) -> None:
        """Fetch and pin open files, read or not: their objects may soon be gone. The page cache alone is no safe copy."""
        for held in opened:
            self._recent.discard(held)
            self._pin(held)
            if not held.ready and not self.disk_copies.holds(held):
                self._demand(held)

    def _pin(self, held: HeldSlice) -> None:
        if not held.role.pinned:
            self.cache.set_role(held, Role.OPEN)

    def _is_kept(self, held: HeldSlice) -> bool:
        return self.opened_are_kept and held.entry.step >= self.cache.floor

    def _is_primed(self, held: HeldSlice) -> bool:
        return held.key in self.priming().primed

    def _note_reading(self, held: HeldSlice) -> None:
        self.on_reading(*held.key)
        self.queue.note_reading(held)

    def _demand(self, held: HeldSlice) -> None:
        self.queue.demand(held)
        self.loader.notify()


class SliceHandle:
    """One open of a slice, as behind a file descriptor of the mount: keeps its bytes in memory until `close`.

    Holds no bytes and no position: forked DataLoader workers share descriptors, so everything learned from reads belongs
    to the slice.
    """

    __slots__ = ("_closed", "_held", "_reads", "_unread", "length")

    def __init__(self, reads: SliceReads, held: HeldSlice) -> None:
        self._reads = reads
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
            self._reads.begin_reading(self._held)
        self._held.read_at = trio.current_time()
        number, start = divmod(offset, BLOCK_BYTES)
        if number != self._held.reading:
            self._reads.move_to(self._held, number)
        if start + size <= BLOCK_BYTES and self._held.is_ready(number):  # the common case, without a timer
            self._reads.counts.bytes_delivered += stop - offset
            return self._held.window(number, start, start + stop - offset)
        began = trio.current_time()
        try:
            with trio.move_on_after(self._reads.deadline_s):
                view = await self._window(offset, stop)
                self._reads.counts.bytes_delivered += len(view)
                return view
        finally:
            self._reads.counts.wait_seconds.observe(trio.current_time() - began)
        raise StoreUnreachableError(
            f"{self._held.entry.tgb.key}: the store did not deliver step {self._held.entry.step} "
            f"within {self._reads.deadline_s:g} s; check it, the read may be repeated"
        )

    async def _window(self, offset: int, stop: int) -> memoryview:
        first, last = offset // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if first == last:
            await self._reads.ready_block(self._held, first)
            return self._held.window(first, offset - first * BLOCK_BYTES, stop - first * BLOCK_BYTES)
        joined = bytearray()  # copied at once: a view held meanwhile keeps memory from the block awaited
        for number in range(first, last + 1):
            await self._reads.ready_block(self._held, number)
            base = number * BLOCK_BYTES
            joined += self._held.window(number, max(offset - base, 0), min(stop - base, BLOCK_BYTES))
        return memoryview(joined)

    def close(self) -> None:
        """Let the bytes go when room is needed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._reads.close(self._held)
