"""Which block is fetched next, how many at a time, and from where: the disk cache, else the store.

Demands of open files come first, those nearest to their reader, and keep a quarter of the connections; then the requests
for later steps, planned as late as possible so that neighbours are joined in one GET.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from stepfs.data.blocks import Block, CachedSlice, RangeCheck, State
from stepfs.data.buffers import Buffer
from stepfs.data.cache import Cache
from stepfs.data.counters import DataCounts
from stepfs.data.disk import WriteBehind
from stepfs.data.fetch import ConcurrencyLimit, Fetcher, FetchTarget, StoreOf
from stepfs.errors import CorruptError, StepfsError, StoreUnreachableError
from stepfs.format.ids import SliceIndex, SliceKey, Step
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import Descriptor
from stepfs.store.api import Store

_REST_S: Final = 10.0

PrefetchRequest = tuple[StepEntry, Sequence[SliceIndex]]


@dataclass(eq=False)
class FetchQueue:
    """The queue of blocks to fetch."""

    cache: Cache
    on_disk: Callable[[CachedSlice], bool]
    primed: Callable[[], Container[SliceKey]]

    def __post_init__(self) -> None:
        self._demands: dict[Step, tuple[StepEntry, set[SliceIndex]]] = {}
        self.prefetch_requests: list[PrefetchRequest] = []
        self._planned = 0  # requests before it were planned
        self._served_since: set[SliceKey] = set()  # demanded or read, since the requests were made
        self._rest: dict[SliceKey, float] = {}
        self._queue: list[Block] = []

    def demand(self, held: CachedSlice) -> None:
        """An open file needs all of this slice."""
        self._demands.setdefault(held.entry.step, (held.entry, set()))[1].add(held.index)
        self.note_reading(held)

    def note_reading(self, held: CachedSlice) -> None:
        """A reader has the slice, or demands it. One that only opens it, to look or to map it, takes nothing."""
        self._served_since.add(held.key)

    def closed(self, held: CachedSlice) -> None:
        """The last reader closed it: drop fetches that have not started, unless the file was only looked at."""
        if held.entry.step in self._demands:
            self._demands[held.entry.step][1].discard(held.index)
        if held.key in self._served_since:
            for block in self._queue:
                if held in block.owners and block.state is State.QUEUED and not block.pinned:
                    self.cache.drop(block)

    def prefetch(self, prefetch_requests: Iterable[PrefetchRequest]) -> set[SliceKey]:
        """Replace the prefetch requests, nearest first; drops the blocks of former ones. Returns the requested slices."""
        self.prefetch_requests = list(prefetch_requests)
        self._planned = 0
        self._served_since.clear()
        requested = {(entry.step, index) for entry, indices in self.prefetch_requests for index in indices}
        for block in self._queue:
            if block.state is State.QUEUED and not block.pinned:
                self.cache.drop(block)  # it may be read last now: waiting for memory, it would hold up all others
        return requested

    def replan(self) -> None:
        """A block that was in memory, or counted as such, is gone: look at all requests again."""
        self._planned = 0

    def forget_below(self, step: Step) -> None:
        self.prefetch_requests = [request for request in self.prefetch_requests if request[0].step >= step]
        self._planned = 0

    def failed(self, block: Block) -> None:
        """The block cannot be had now; only readers try again at once."""
        for owner in block.owners:
            self._rest[owner.key] = trio.current_time() + _REST_S

    def split(self, block: Block) -> None:
        """Fetch the pieces of a joined block one by one."""
        self._queue += self.cache.split(block)

    def next(self, *, prefetch: bool, in_order: int) -> Block | None:
        """The most urgent block, still queued; with `prefetch`, not only for open files. Of an open slice at most
        `in_order` blocks are under way, and nothing is fetched ahead while others of it are held back."""
        for entry, indices in self._demands.values():
            also = [request for request in self.prefetch_requests if request[0].step == entry.step]
            self._plan(entry, indices.union(*map(self._outstanding, also)))
        self._demands.clear()
        self._queue = [block for block in self._queue if block.state is State.QUEUED]
        while prefetch and not self._queue and self._planned < len(self.prefetch_requests):
            request = self.prefetch_requests[self._planned]
            self._planned += 1
            self._plan(request[0], self._outstanding(request))
        ready = [block for block in self._queue if not _is_held_back(block, in_order)]
        block = min(ready, key=_urgency, default=None)
        prefetch = prefetch and len(ready) == len(self._queue)
        return block if block is not None and (block.pinned or prefetch) else None

    def _plan(self, entry: StepEntry, indices: Iterable[SliceIndex]) -> None:
        self.cache.lower_floor(entry.step)
        fetched = []
        for index in indices:
            if self.on_disk(self.cache.get_or_add(entry, index)):
                self._queue += self.cache.plan(entry, [index])  # a file each
            else:
                fetched.append(index)
        self._queue += self.cache.plan(entry, fetched)

    def _outstanding(self, request: PrefetchRequest) -> list[SliceIndex]:
        """The slices of a request that are neither served since, nor resting after a failure, nor in the page cache."""
        entry, requested = request
        step, served_since, primed = entry.step, self._served_since, self.primed()
        outstanding = [
            index for index in requested if (step, index) not in primed and (step, index) not in served_since
        ]
        if self._rest:
            now = trio.current_time()
            self._rest = {key: until for key, until in self._rest.items() if until > now}
            outstanding = [index for index in outstanding if (step, index) not in self._rest]
        return outstanding


def _is_held_back(block: Block, in_order: int) -> bool:
    return block.owners[0].loading >= in_order and block.pinned and not block.waiting


def _urgency(block: Block) -> tuple[int, int, int]:
    """Smallest first: a reader is blocked on it; of an open file, nearest to where it is read; the nearest step."""
    if block.waiting:
        return 0, 0, 0
    if block.pinned:
        piece = block.range.pieces[0]
        ahead = piece.block - min(owner.reading for owner in block.owners)
        return 1, 0 if ahead >= 0 else 1, abs(ahead)
    return 2, block.step, block.range.offset


@dataclass(frozen=True, eq=False, slots=True)
class Sources:
    """The sources of one mount's blocks."""

    cache: Cache
    disk_copies: WriteBehind
    counts: DataCounts
    fetcher: Fetcher
    store: Store
    origin_store: StoreOf | None  # of data of a fork's parent (`origin` > 0)

    async def load(self, block: Block, buffer: Buffer) -> Buffer:
        """The verified bytes, in `buffer` or in another one in its place. Any exception consumes `buffer`."""
        if self.cache.copied(block) and await self._load_copy(block, buffer):
            return buffer
        target = FetchTarget(self._store_of, block.entry, block.range)
        return await self.fetcher.fetch(target, buffer, lambda: self.cache.lease(block.range.size, block))

    async def _load_copy(self, block: Block, buffer: Buffer) -> bool:
        """From disk into `buffer`; False for a damaged file, which is removed."""
        owner = block.owners[0]
        check = RangeCheck(block.range, buffer)
        got = await self.disk_copies.load(owner, block.range.offset - owner.ref.offset, buffer.view(), check.update)
        problem = check.problem(got)
        if problem is not None:
            self.disk_copies.reject(owner, problem)
            return False
        self.counts.disk_hits += 1
        return True

    async def _store_of(self, tgb: Descriptor) -> Store:
        if tgb.origin == 0:
            return self.store
        if self.origin_store is None:
            raise StepfsError(f"the lake shares data of origin {tgb.origin}, which this mount cannot open")
        return await self.origin_store(tgb)


_log = logging.getLogger("stepfs.data")
_IN_ORDER_FIRST: Final = 4
_IN_ORDER_GROWTH: Final = 1.5  # so GETs on a full link take no longer than a second one waits (`fetch.hedge`)
_MEMORY_POLL_S: Final = 0.05  # memory still seen by a reader or an abandoned thread returns without a signal


@dataclass(eq=False)
class BlockLoader:
    """The loads of one mount."""

    cache: Cache
    queue: FetchQueue
    sources: Sources
    concurrency: ConcurrencyLimit  # of the loads under way
    loaded: Callable[[Block], None]  # called for each block that became READY
    readers_waiting: int = 0  # blocked on a block

    def __post_init__(self) -> None:
        self.planned = trio.Event()  # set and replaced after each look at the queue
        self._in_order = ConcurrencyLimit(
            self.concurrency.limit_max,
            first=_IN_ORDER_FIRST,
            growth=_IN_ORDER_GROWTH,
            fixed=self.concurrency.fixed,
        )
        self._active = 0
        self._wake = trio.Event()

    def notify(self) -> None:
        """The queue, or the memory that is free, may have changed."""
        self._wake.set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                self._wake = trio.Event()
                short = self._start_loads(nursery)
                poll = short and (self.cache.pool.lingering or self.cache.pool.refused)
                with trio.move_on_after(_MEMORY_POLL_S if poll else float("inf")):
                    await self._wake.wait()

    def _start_loads(self, nursery: trio.Nursery) -> bool:
        """Start as many fetches as connections and memory allow; True if memory is the limit."""
        limit = self.concurrency.limit
        prefetches = max(1, limit - limit // 4)
        while self._active < limit:
            block = self.queue.next(prefetch=self._active < prefetches, in_order=self._in_order.limit)
            self.planned.set()
            self.planned = trio.Event()
            if block is None:
                return False
            buffer = self.cache.lease(block.range.size, block)
            if buffer is None:
                return True
            block.state = State.FETCHING
            self._active += 1
            for owner in block.owners:
                owner.loading += 1
            nursery.start_soon(self._load, block, buffer)
        return False

    async def _load(self, block: Block, buffer: Buffer) -> None:
        loaded: Buffer | None = None
        began = trio.current_time()
        learns = self._in_order.start() if _is_read_in_order(block) else None
        try:
            loaded = await self.sources.load(block, buffer)
        except StepfsError as error:
            self._failed(block, error)
        finally:
            self._active -= 1
            for owner in block.owners:
                owner.loading -= 1
            if learns is not None:
                took_s = None if loaded is None else trio.current_time() - began
                self._in_order.note_loaded(readers_wait=self.readers_waiting > 0)
                self._in_order.end(learns, block.range.size, took_s)
            self.notify()
        if loaded is None:
            return
        self.concurrency.note_loaded(readers_wait=self.readers_waiting > 0)
        if block.state is not State.FETCHING:
            self.cache.pool.give(loaded)  # forgotten meanwhile
            return
        self.cache.ready(block, loaded)
        self.loaded(block)

    def _failed(self, block: Block, error: StepfsError) -> None:
        if block.state is State.FETCHING:
            if isinstance(error, CorruptError) and len(block.owners) > 1:
                self.queue.split(block)  # only some of them are damaged
                return
            if not block.pinned and not isinstance(error, StoreUnreachableError):
                # Else a reader gets the error.
                _log.warning("%s", error, extra={"alike": (type(error), str(error))})
            self.queue.failed(block)
            self.cache.fail(block, error)


def _is_read_in_order(block: Block) -> bool:
    """Whether it is one of several blocks of an open slice."""
    return block.pinned and len(block.owners[0].places) > 1
