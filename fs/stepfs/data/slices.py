"""The slices of one mount or reader: file handles read them, the prefetcher requests them, the primer follows them.

`Slices.open` never waits: it pins the slice and requests it. A read waits for the one block that it needs. After
each await the block may have been evicted again, so it is looked at again, and used before the next await.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import trio

from stepfs.data.blocks import Block, CachedSlice, Role, State
from stepfs.data.buffers import Pool
from stepfs.data.circuit_breaker import Patience
from stepfs.data.counters import DataCounts
from stepfs.data.disk_cache import DiskCache, WriteBehind
from stepfs.data.fetch import BlockLoader, ConcurrencyLimit, Fetcher, FetchQueue, PrefetchRequest, StoreOf
from stepfs.data.memory_cache import Cache, OpenSlices, ReadingOrder
from stepfs.data.near import Near
from stepfs.data.waiting import Ledger, Wait
from stepfs.errors import StepfsError, StoreUnreachableError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, SliceKey, Step
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import Descriptor
from stepfs.store.api import Store

_CLOSED_MAX: Final = 4096  # slices with a reader behind that are remembered


class PageCache(Protocol):
    """The calls that the mount offers. Called in worker threads only; OSError where it cannot be done."""

    def path(self, step: Step, index: SliceIndex) -> Path: ...

    def store_pages(self, inode: int, offset: int, data: memoryview) -> None:
        """`pyfuse3.notify_store`."""
        ...


class Priming:
    """What slices tell `stepfs.data.page_cache.Primer`; by itself it leaves the page cache to the kernel."""

    @property
    def primed(self) -> Collection[SliceKey]:
        """The slices in the page cache, as far as is known: they need not be in memory too."""
        return ()

    def changed(self) -> None:
        """A slice became ready, readers moved, or memory is short: all requests are looked at again."""

    async def settle(self) -> None:
        """Return once everything that is ready is in the page cache, as far as there is room."""

    def idle(self, key: SliceKey) -> None:
        """A file is open, apparently without a reader: its pages may be dropped for others."""

    def closed(self, key: SliceKey, *, awaited: bool = False) -> None:
        """A file was closed: its pages may go when room is needed."""

    def forget_below(self, step: Step) -> None:
        """Names of steps below leave the mount, and with the names the kernel drops the pages."""


class Shelter:
    """The waits of readers' requests. Closed over them, they outlive the cancellation of the task around them: a daemon
    that is replaced answers what it has read.
    """

    def __init__(self) -> None:
        self._closed = False
        self._waits: set[trio.CancelScope] = set()

    @contextmanager
    def wait(self, seconds: float = float("inf")) -> Iterator[None]:
        """Inside the context a request waits, at most so long."""
        scope = trio.move_on_after(seconds, shield=self._closed)
        self._waits.add(scope)
        try:
            with scope:
                yield
        finally:
            self._waits.discard(scope)

    def close(self, closed: bool = True) -> None:
        """Or open it again: what waits in a cancelled task ends then."""
        self._closed = closed
        for scope in self._waits:
            scope.shield = closed


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
        origin_store: StoreOf | None = None,
        opened_are_kept: bool = False,
        peers: int = 1,
        near: Store | None = None,
    ) -> None:
        """`memory_bytes`: the one budget for bytes in memory. `disk`: a second layer behind it. `concurrency` bounds the
        GETs under way. `origin_store` opens the store of a fork's parent (descriptors with `origin` > 0). `opened_are_kept`:
        the store keeps the objects of steps from `forget_below` upwards, so open files without readers may leave memory.
        `peers`: how many readers open each slice, one behind the other. `near`: asked for bytes before `store`.
        """
        self.counts = DataCounts()
        self.ledger = Ledger()
        pool, concurrency = Pool(memory_bytes), concurrency or ConcurrencyLimit()
        self._fetcher = Fetcher(
            pool, self.counts, self._store_of, deadline_s=deadline_s, concurrency=concurrency,
            throttled=lambda: store.counts.throttled,
        )  # fmt: skip
        patience = partial(Patience, pool=pool, start_soon=self._fetcher.start_soon)
        self.disk_copies = WriteBehind(
            disk, self.counts, self._written, self._is_pinned, self._is_last_copy, patience(str(disk and disk.path))
        )
        self.cache = Cache(pool, self.counts, self.disk_copies.holds)
        self.deadline_s = deadline_s
        self.shelter = Shelter()
        self.opens = 0
        self.opened_bytes = 0
        self.on_reading: Callable[[Step, SliceIndex], None] = lambda _step, _index: None
        self._store = store
        self._origin_store = origin_store
        self._disk = disk
        self._opened_are_kept = opened_are_kept
        self._peers = peers
        self._priming = Priming()
        self._recent = OpenSlices()
        self._closes: OrderedDict[SliceKey, int] = OrderedDict()  # of slices that another reader has yet to open
        self._queue = FetchQueue(self.cache, self.disk_copies.holds, self._primed)
        self.near = None if near is None else Near(near, self.counts, patience(near.url))
        self._loader = BlockLoader(
            self.cache, self._queue, self.disk_copies, self.counts, self._fetcher, concurrency, self._loaded, self.near
        )
        self._copies = 1  # in memory, of a slice fetched ahead: priming without a disk keeps a second one

    @property
    def slice_bytes(self) -> int:
        """Mean length of the slices opened so far, 0 before the first."""
        return self.opened_bytes // max(1, self.opens)

    def open(self, entry: StepEntry, index: SliceIndex) -> SliceHandle:
        """Open a slice. Never waits. IndexError beyond the last slice.

        A missing slice is fetched at its first READ; at once if the store may lose the object before that.
        """
        held = self.cache.get_or_add(entry, index)
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

    def begin_reading(self, held: CachedSlice) -> None:
        """The first READ of a handle, or the first after it was idle."""
        self._note_reading(held)
        self._pin(held)
        if self._is_kept(held):
            self._recent.add(held)
        if held.missing and not self.disk_copies.holds(held) and not self._is_primed(held):
            self._demand(held)

    def move_to(self, held: CachedSlice, number: int) -> None:
        """A reader came to another block: the blocks that it passed may make room for its next ones."""
        held.move_to(number)
        self._loader.notify()

    async def ready_block(self, held: CachedSlice, number: int, wait: Wait) -> None:
        """Return once block `number` is READY; the caller uses it before its next await. `wait`: of the reader."""
        while True:
            block = held.places[number]
            if block is None:
                held.reading = number  # a slice that was passed is fetched from this block on
                self._demand(held)
                with wait.on(dict):
                    await self._loader.planned.wait()
                continue
            if block.state is State.READY:
                block.read_at = trio.current_time()
                return
            block.waiting += 1
            self._loader.readers_waiting += 1
            self._loader.notify()
            try:
                with wait.on(partial(block.blame, trio.current_time())):
                    await block.settled.wait()
            finally:
                block.waiting -= 1
                self._loader.readers_waiting -= 1
                self._loader.notify()  # the block may make room for another reader now
            if block.error is not None and not isinstance(block.error, StoreUnreachableError):
                raise type(block.error)(*block.error.args)  # a fresh one: its traceback is this reader's

    def close(self, held: CachedSlice) -> None:
        held.handles -= 1
        awaited = self._note_close(held.key)
        if held.handles:
            return
        self._recent.discard(held)
        kept = awaited and not self._is_primed(held)  # its pages are enough for a peer
        self.cache.set_role(held, Role.AWAITED if kept else Role.CONSUMED)
        self.disk_copies.unpinned(held, consumed=not awaited)
        self._queue.closed(held)
        self._priming.closed(held.key, awaited=awaited)
        self._loader.notify()

    def _note_close(self, key: SliceKey) -> bool:
        """Count a close; True if another reader of the slice has yet to open it."""
        closes = self._closes.pop(key, 0) + 1
        if closes >= self._peers:
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
            self._priming.idle(held.key)
            self._loader.notify()

    def keep_opened(self) -> None:
        """The store no longer keeps the objects of open files: hold their bytes from now on."""
        self._opened_are_kept = False
        self.hold(self.cache.opened())

    def hold(self, opened: Iterable[CachedSlice]) -> None:
        """Fetch and pin open files, read or not: their objects may soon be gone. The page cache alone is no safe copy."""
        for held in opened:
            self._recent.discard(held)
            self._pin(held)
            if not held.ready and not self.disk_copies.holds(held):
                self._demand(held)

    def _pin(self, held: CachedSlice) -> None:
        if not held.role.pinned:
            self.cache.set_role(held, Role.OPEN)

    def _is_kept(self, held: CachedSlice) -> bool:
        return self._opened_are_kept and held.entry.step >= self.cache.floor

    def _is_primed(self, held: CachedSlice) -> bool:
        return held.key in self._priming.primed

    def _note_reading(self, held: CachedSlice) -> None:
        self.on_reading(*held.key)
        self._queue.note_reading(held)

    def _demand(self, held: CachedSlice) -> None:
        self._queue.demand(held)
        self._loader.notify()

    def attach(self, priming: Priming) -> None:
        """Let `priming` follow idle, closed and forgotten slices."""
        self._priming = priming
        self._copies = 2

    def request(self, requests: Iterable[PrefetchRequest]) -> None:
        """Replace the slices that will be opened next, nearest first. They are fetched as the budget allows."""
        requested = self._queue.prefetch(requests)
        for key in requested:
            held = self.cache.get(*key)
            if held is not None and held.role in {Role.IDLE, Role.CONSUMED}:
                self.cache.set_role(held, Role.WANTED)
        self.make_idle()
        self.changed()

    async def settle(self) -> None:
        """Fetch nothing ahead until `go_on`. Returns once what is under way has come, and is in the page cache."""
        await self._loader.settle()
        await self._priming.settle()

    def go_on(self) -> None:
        self._loader.settling = False
        self._loader.notify()

    @property
    def requested(self) -> list[PrefetchRequest]:
        """The slices that will be opened next, nearest first."""
        return self._queue.prefetch_requests

    def replan(self) -> None:
        """Plan the requests afresh: slices that were counted as primed have left the page cache."""
        self._queue.replan()
        self.make_idle()
        self.changed()

    def set_order(self, order: ReadingOrder) -> None:
        """Set in which order the readers open steps: those that are opened last are evicted first."""
        self.cache.evictable.order = order
        if self._disk is not None:
            self._disk.order = order

    def changed(self) -> None:
        """Wake loader and primer: memory, disk or requests changed, so blocked work may go on."""
        self._loader.notify()
        self._priming.changed()

    def release_copy(self, held: CachedSlice) -> None:
        """The slice is in the page cache: its memory may go if it can be loaded from disk again."""
        if not held.role.pinned and self.disk_copies.holds(held):
            self.cache.release(held)
            self._loader.notify()

    def set_memory(self, limit: int) -> None:
        """Live within `limit` bytes from now on; open slices may exceed it until they are closed."""
        self.cache.shrink(limit)
        self.changed()

    def forget_below(self, step: Step) -> None:
        """Drop slices below `step`, consumed or reclaimed: unpinned ones at once, open ones when they are closed."""
        self.hold(held for held in self.cache.opened() if held.entry.step < step)
        self.cache.forget_below(step)
        self.disk_copies.forget_below(step)
        self._queue.forget_below(step)
        self._priming.forget_below(step)
        self._loader.notify()

    def holds(self, step: Step, index: SliceIndex) -> bool:
        """Whether every byte of the slice is in memory, verified."""
        held = self.cache.get(step, index)
        return held is not None and held.ready

    @property
    def connections_limit(self) -> int:
        return self._fetcher.concurrency.limit

    @property
    def latency_s(self) -> float:
        """The usual worst latency of fetching one block, 0 while unknown."""
        return self._fetcher.policy.p99_s(BLOCK_BYTES) or 0.0

    @property
    def capacity_bytes(self) -> int:
        """Bytes of slices that fit in memory and on disk together."""
        memory = self.cache.pool.limit
        return memory // self._copies if self._disk is None else memory + self._disk.limit

    def budgets(self) -> dict[str, int]:
        pool, disk = self.cache.pool, self._disk
        return {
            "memory_bytes": pool.used,
            "memory_limit_bytes": pool.limit,
            "disk_bytes": 0 if disk is None else disk.used,
            "disk_limit_bytes": 0 if disk is None else disk.limit,
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with self._fetcher.serving(), trio.open_nursery() as nursery:
            await nursery.start(self.disk_copies.run)
            task_status.started()
            await self._loader.run()

    def _loaded(self, block: Block) -> None:
        for owner in block.owners:
            if owner.ready:
                self.disk_copies.enqueue(owner)
                self.changed()

    def _written(self, held: CachedSlice) -> None:
        self.cache.saved(held)
        if held.key in self._primed():
            self.release_copy(held)
        self._loader.notify()

    def _is_pinned(self, key: SliceKey) -> bool:
        return self.cache.is_pinned(key)

    def _is_last_copy(self, key: SliceKey) -> bool:
        """Whether the copy on disk is the only one: primed pages replaced the copy in memory."""
        return key in self._primed() and not self.holds(*key)

    async def _store_of(self, tgb: Descriptor) -> Store:
        if tgb.origin == 0:
            return self._store
        if self._origin_store is None:
            raise StepfsError(f"the lake shares data of origin {tgb.origin}, which this mount cannot open")
        return await self._origin_store(tgb)

    def _primed(self) -> Collection[SliceKey]:
        return self._priming.primed


class SliceHandle:
    """One open of a slice, as behind a file descriptor of the mount: keeps its bytes in memory until `close`.

    Holds no bytes and no position: forked DataLoader workers share descriptors, so everything learned from reads belongs
    to the slice.
    """

    __slots__ = ("_closed", "_held", "_slices", "_unread", "length")

    def __init__(self, slices: Slices, held: CachedSlice) -> None:
        self._slices = slices
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
            self._slices.begin_reading(self._held)
        self._held.read_at = trio.current_time()
        number, start = divmod(offset, BLOCK_BYTES)
        if number != self._held.reading:
            self._slices.move_to(self._held, number)
        if start + size <= BLOCK_BYTES and self._held.is_ready(number):  # the common case, without a timer
            self._slices.counts.bytes_delivered += stop - offset
            return self._held.window(number, start, start + stop - offset)
        with (
            self._slices.ledger.waiting("data", self._held.entry.step, index=self._held.index) as wait,
            self._slices.shelter.wait(self._slices.deadline_s),
        ):
            view = await self._window(offset, stop, wait)
            self._slices.counts.bytes_delivered += len(view)
            return view
        raise StoreUnreachableError(
            f"{self._held.entry.tgb.key}: the store did not deliver step {self._held.entry.step} "
            f"within {self._slices.deadline_s:g} s; check it, the read may be repeated"
        )

    async def _window(self, offset: int, stop: int, wait: Wait) -> memoryview:
        first, last = offset // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if first == last:
            await self._slices.ready_block(self._held, first, wait)
            return self._held.window(first, offset - first * BLOCK_BYTES, stop - first * BLOCK_BYTES)
        joined = bytearray()  # copied at once: a view held meanwhile keeps memory from the block awaited
        for number in range(first, last + 1):
            await self._slices.ready_block(self._held, number, wait)
            base = number * BLOCK_BYTES
            joined += self._held.window(number, max(offset - base, 0), min(stop - base, BLOCK_BYTES))
        return memoryview(joined)

    def close(self) -> None:
        """Let the bytes go when room is needed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._slices.close(self._held)
