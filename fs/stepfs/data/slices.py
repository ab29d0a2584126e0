"""The open slices of a mount: fetched whole, served block by verified block, pinned until closed.

`open` never waits: it pins the slice and requests it. A read waits for the one block that it needs. Requests of one
turn of the loop are planned together, so that eight ranks opening eight neighbours cost one GET. What holds between two
awaits: `ready_block` waits only on `Block.settled` and for the next plan. After either the block may have been evicted
again, so it checks again; the caller uses the block before its next await.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import trio

from stepfs.data.blocks import Block, HeldSlice, State
from stepfs.data.buffers import Pool
from stepfs.data.cache.disk import DiskCache
from stepfs.data.cache.memory import Cache
from stepfs.data.cache.opened import OpenSlices
from stepfs.data.cache.readers import ReaderCounts
from stepfs.data.cache.write_behind import WriteBehind
from stepfs.data.counters import DataCounts
from stepfs.data.fetch.concurrency import ConcurrencyLimit
from stepfs.data.fetch.fetcher import Fetcher
from stepfs.data.handle import SliceHandle
from stepfs.data.loading import BlockLoader
from stepfs.data.protocols import Priming, Unprimed
from stepfs.data.queue import FetchQueue, PrefetchRequest
from stepfs.data.sources import DiskSource, OriginStore, StoreSource
from stepfs.errors import StoreUnreachableError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, SliceKey, Step
from stepfs.format.snapshot import StepEntry
from stepfs.store.api import Store


class Slices:
    """The slices of one mount."""

    def __init__(
        self,
        store: Store,
        *,
        memory_bytes: int,
        disk: DiskCache | None = None,
        deadline_s: float = 300.0,
        concurrency: ConcurrencyLimit | None = None,
        origin_store: OriginStore | None = None,
        counts: DataCounts | None = None,
        opened_are_kept: bool = False,
    ) -> None:
        """`memory_bytes`: the one budget for bytes in memory. `disk`: a second layer behind it. `concurrency` bounds the
        GETs under way. `origin_store` opens the store of a fork's parent (descriptors with `origin` > 0). `opened_are_kept`:
        the store keeps the objects of steps from `forget_below` upwards, so open files without readers may leave memory."""
        self.counts = counts or DataCounts()
        self.spill = WriteBehind(disk, self.counts, self._written, self._is_last_copy)
        self.cache = Cache(Pool(memory_bytes), self.counts, self.spill.holds)
        self.deadline_s = deadline_s
        self._priming: Priming = Unprimed()
        self._queue = FetchQueue(self.cache, self.spill.holds, self._primed)
        self.concurrency = concurrency = concurrency or ConcurrencyLimit()
        self._fetcher = Fetcher(self.cache.pool, self.counts, deadline_s=deadline_s, concurrency=concurrency)
        sources = (
            DiskSource(self.spill, self.cache, self.counts),
            StoreSource(self._fetcher, self.cache, store, origin_store),
        )
        self._loader = BlockLoader(
            self.cache, self._queue, sources, concurrency=concurrency, loaded=self._loaded
        )
        self.on_reading: Callable[[Step, SliceIndex], None] = lambda _step, _index: None
        self._open = OpenSlices()
        self._readers = ReaderCounts()
        self._opened_are_kept = opened_are_kept
        self._opens = 0
        self._opened_bytes = 0

    def open(self, entry: StepEntry, index: SliceIndex) -> SliceHandle:
        """Open a slice. Never waits. IndexError beyond the last slice.

        A missing slice is fetched at its first READ; at once if the store may lose the object before that.
        """
        held = self.cache.hold(entry, index)
        held.handles += 1
        if self._readers.note_open(held.key):
            self._expect_readers()
        self._pin(held)
        self._opens += 1
        self._opened_bytes += held.length
        if held.ready or self.spill.holds(held) or held.key in self._primed():
            self.counts.hits += 1  # on disk: loaded when it is read, unless primed pages serve the reader
        else:
            self.counts.misses += 1
            if not self._is_kept(entry.step):
                self._demand(held)
        if held.key in self._primed():
            self._note_reading(held)  # the page cache serves it: no READ will arrive
        if self._is_kept(entry.step):
            self._open.add(held)
            self._make_idle()
        return SliceHandle(self, held)

    def begin_reading(self, held: HeldSlice) -> None:
        """The first READ of a handle, or the first after it was idle."""
        self._note_reading(held)
        self._pin(held)
        if self._is_kept(held.entry.step):
            self._open.add(held)
        if held.missing and not self.spill.holds(held) and held.key not in self._primed():
            self._demand(held)

    def move_to(self, held: HeldSlice, number: int) -> None:
        """A reader came to another block: the blocks that it passed may make room for its next ones."""
        held.move_to(number)
        self._loader.notify()

    def keep_opened(self) -> None:
        """The store no longer keeps the objects of open files: hold their bytes from now on."""
        self._opened_are_kept = False
        self._hold(self.cache.opened())

    def _is_kept(self, step: Step) -> bool:
        return self._opened_are_kept and step >= self.cache.floor

    def _make_idle(self) -> None:
        for held in self._open.make_idle(self.cache.pool.limit, trio.current_time()):
            self.cache.make_idle(held)
            self.spill.unpin(held)
            self._priming.idle(held.key)
            self._loader.notify()

    def _pin(self, held: HeldSlice) -> None:
        if not held.pins:
            self.cache.pin(held)
            self.spill.pin(held)

    def _note_reading(self, held: HeldSlice) -> None:
        self.on_reading(*held.key)
        self._queue.note_reading(held)

    def _demand(self, held: HeldSlice) -> None:
        self._queue.demand(held)
        self._loader.notify()

    def _hold(self, opened: Iterable[HeldSlice]) -> None:
        """Fetch and pin open files, read or not: their objects may soon be gone. The page cache alone is no safe copy."""
        for held in opened:
            self._open.discard(held)
            self._pin(held)
            if not held.ready and not self.spill.holds(held):
                self._demand(held)

    def prefetch(self, prefetch_requests: Iterable[PrefetchRequest]) -> None:
        """Replace the list of slices that will be opened next, nearest first. Fetched as the budget allows."""
        prefetch_requests = list(prefetch_requests)
        self._queue.prefetch(prefetch_requests)
        for held in self._open.take_idle(
            (entry.step, index) for entry, indices in prefetch_requests for index in indices
        ):
            self.cache.expect(held)
        self._make_idle()
        self.changed()

    def prefetch_requests(self) -> Sequence[PrefetchRequest]:
        """The prefetch requests, nearest first."""
        return self._queue.prefetch_requests

    def replan_prefetch(self) -> None:
        """Plan the prefetch requests afresh: slices that were counted as primed have left the page cache."""
        self._queue.replan()
        self._loader.notify()

    def attach(self, priming: Priming) -> None:
        """Let `priming` follow idle, closed and forgotten slices."""
        self._priming = priming

    def release_copy(self, held: HeldSlice) -> None:
        """The slice is in the page cache: its memory may go if it can be loaded from disk again."""
        if not held.pins and self.spill.holds(held):
            self.cache.release(held)
            self._loader.notify()

    def set_memory(self, limit: int) -> None:
        """Live within `limit` bytes from now on; open slices may exceed it until they are closed."""
        self.cache.shrink(limit)
        self.changed()

    def holds(self, step: Step, index: SliceIndex) -> bool:
        """Whether every byte of the slice is in memory, verified."""
        held = self.cache.get(step, index)
        return held is not None and held.ready

    def set_low(self, step: Step) -> None:
        """Set the lowest step of any reader; slices below it that no reader opened are evicted early."""
        self.cache.evictable.low = step
        if self.spill.disk is not None:
            self.spill.disk.low = step

    def forget_below(self, step: Step) -> None:
        """Drop slices below `step`, consumed or reclaimed: unpinned ones at once, open ones when they are closed."""
        self._hold(held for held in self.cache.opened() if held.entry.step < step)
        self.cache.forget_below(step)
        self.spill.forget_below(step)
        self._queue.forget_below(step)
        self._priming.forget_below(step)
        self._loader.notify()

    @property
    def latency_s(self) -> float:
        """The usual worst latency of fetching one block, 0 while unknown."""
        return self._fetcher.policy.p99_s(BLOCK_BYTES) or 0.0

    @property
    def slice_bytes(self) -> int:
        """Mean length of the slices opened so far, 0 before the first."""
        return self._opened_bytes // max(1, self._opens)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of slices that fit in memory and on disk together. Without a disk, priming keeps a second copy in memory."""
        if self.spill.disk is not None:
            return self.cache.pool.limit + self.spill.disk.limit
        return self.cache.pool.limit // (1 if isinstance(self._priming, Unprimed) else 2)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetch in the background until cancelled."""
        async with self._fetcher.serving(), trio.open_nursery() as nursery:
            await nursery.start(self.spill.run)
            task_status.started()
            await self._loader.run()

    async def ready_block(self, held: HeldSlice, number: int) -> None:
        """Return once block `number` is READY; the caller uses it before its next await."""
        while True:
            block = held.places[number]
            if block is None:
                held.reading = number  # a partial slice is fetched from this block on
                self._demand(held)
                await self._loader.planned.wait()
                continue
            if block.state is State.READY:
                block.read_at = trio.current_time()
                return
            block.waiting += 1
            self._loader.readers_waiting += 1
            self._loader.notify()
            try:
                await block.settled.wait()
            finally:
                block.waiting -= 1
                self._loader.readers_waiting -= 1
            if block.error is not None and not isinstance(block.error, StoreUnreachableError):
                raise type(block.error)(*block.error.args)  # a fresh one: its traceback is this reader's

    def close(self, held: HeldSlice) -> None:
        """A handle was closed."""
        held.handles -= 1
        self._readers.note_close(held.key)
        if held.handles:
            return
        self._open.discard(held)
        awaited = self._readers.is_awaited(held.key)
        if held.pins:
            self.spill.unpin(held, consumed=not awaited)
        if awaited and held.key not in self._primed():
            self.cache.keep_for_peer(held)
        else:  # its pages are enough for a peer
            held.pins = 0
            self.cache.consume(held)
        self._queue.closed(held)
        self._priming.closed(held.key, awaited=awaited)
        self._loader.notify()

    def _expect_readers(self) -> None:
        """The usual number of readers of a file changed."""
        self.cache.file_closed(self._readers.is_awaited)
        self._priming.file_closed(self._readers.is_awaited)

    def changed(self) -> None:
        """Wake loader and primer: memory, disk or requests changed, so blocked work may go on."""
        self._loader.notify()
        self._priming.changed()

    def _loaded(self, block: Block) -> None:
        for owner in block.owners:
            if owner.ready:
                self.spill.enqueue(owner)
                self.changed()

    def _written(self, held: HeldSlice) -> None:
        self.cache.saved(held)
        if held.key in self._primed():
            self.release_copy(held)
        self._loader.notify()

    def _is_last_copy(self, key: SliceKey) -> bool:
        """Whether the copy on disk is the only one: primed pages replaced the copy in memory."""
        return key in self._primed() and not self.holds(*key)

    def _primed(self) -> Collection[SliceKey]:
        return self._priming.primed
