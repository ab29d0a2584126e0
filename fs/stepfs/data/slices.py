"""What a mount holds open: slices fetched whole, served block by verified block, pinned until closed.

`open` never waits: it pins and asks. Reads wait for the one block they need. What is asked for in one turn of the
loop is planned together, so that eight ranks opening eight neighbours cost one GET. Which awaits may yield: `read`
waits only on `Block.settled` and for the next plan; after either the block may have been evicted again, so it looks
again, and what it found is used before the next await.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Final, Protocol

import trio

from stepfs.data.agenda import Agenda, Key, Wish
from stepfs.data.blocks import Block, HeldSlice, State
from stepfs.data.buffers import Buffer, Pool
from stepfs.data.cache import Cache
from stepfs.data.checks import Check
from stepfs.data.counts import DataCounts
from stepfs.data.disk import DiskCache
from stepfs.data.fetch import Fetcher, Target
from stepfs.data.handle import SliceHandle
from stepfs.data.spill import Spill
from stepfs.errors import StepfsError, StoreUnreachableError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step
from stepfs.format.snapshot import StepEntry
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.data")
_MEMORY_POLL_S: Final = 0.05  # memory still seen by a reader or an abandoned thread returns without a signal

OriginStore = Callable[[int], Awaitable[Store]]


class Priming(Protocol):
    """`stepfs.data.prime.Primer`, as it is told what happens here."""

    @property
    def primed(self) -> Collection[Key]: ...
    def changed(self) -> None: ...
    def closed(self, key: Key) -> None: ...
    def forget_below(self, step: Step) -> None: ...


class Slices:
    """The slices of one mount."""

    def __init__(
        self,
        store: Store,
        *,
        memory_bytes: int,
        disk: DiskCache | None = None,
        deadline_s: float = 300.0,
        connections: int = 16,
        origin_store: OriginStore | None = None,
        counts: DataCounts | None = None,
    ) -> None:
        """`memory_bytes`: the one budget for bytes in memory. `disk`: a second layer behind it. `connections`: GETs
        under way at a time. `origin_store` opens the store of a fork's parent (descriptors with `origin` > 0)."""
        self.counts = counts or DataCounts()
        self.spill = Spill(disk, self.counts, self._written, self._is_last_copy)
        self.cache = Cache(Pool(memory_bytes), self.counts, self.spill.holds)
        self.deadline_s = deadline_s
        self._priming: Priming | None = None
        self._agenda = Agenda(self.cache, self.spill.holds, self._primed)
        self._fetcher = Fetcher(self.cache.pool, self.counts, deadline_s=deadline_s)
        self._store = store
        self._origin_store = origin_store
        self._connections = connections
        self._prefetch_connections = max(1, connections - connections // 4)  # demand always finds one free
        self._active = 0
        self._opens = 0
        self._opened_bytes = 0
        self._wake = trio.Event()
        self._planned = trio.Event()

    def open(self, entry: StepEntry, index: SliceIndex) -> SliceHandle:
        """Pin a slice and start fetching what is not at hand. Never waits. IndexError beyond the last slice."""
        held = self.cache.hold(entry, index)
        self.cache.pin(held)
        self.spill.pin(held)
        self._agenda.opened(held)
        self._opens += 1
        self._opened_bytes += held.length
        if held.ready or self.spill.holds(held) or held.key in self._primed():
            self.counts.hits += 1  # on disk: loaded when read, which primed pages may make needless
        else:
            self.counts.misses += 1
            self._agenda.demand(held)
            self._notify()
        return SliceHandle(self, held)

    def wish(self, wishes: Iterable[Wish]) -> None:
        """What will be opened next, nearest first; replaces the former list. Fetched as the budget allows."""
        self._agenda.wish(wishes)
        self.changed()

    def wished(self) -> Sequence[Wish]:
        """The wishes that stand, nearest first."""
        return self._agenda.wishes

    def again(self) -> None:
        """What was thought to be in the page cache is not: plan the wishes afresh."""
        self._agenda.replan()
        self._notify()

    def attach(self, priming: Priming) -> None:
        """Tell a primer what happens here."""
        self._priming = priming

    def release_copy(self, held: HeldSlice) -> None:
        """The slice is in the page cache: its memory may go if it can be loaded from disk again."""
        if not held.pins and self.spill.holds(held):
            self.cache.release(held)
            self._notify()

    def set_memory(self, limit: int) -> None:
        """Live within `limit` bytes from now on; what is open goes over it until it is closed."""
        self.cache.shrink(limit)
        self.changed()

    def holds(self, step: Step, index: SliceIndex) -> bool:
        """Whether every byte of the slice is in memory, verified."""
        held = self.cache.get(step, index)
        return held is not None and held.ready

    def set_low(self, step: Step) -> None:
        """The lowest step a reader is at; what was passed over below it is evicted early."""
        self.cache.evictable.low = step
        if self.spill.disk is not None:
            self.spill.disk.low = step

    def forget_below(self, step: Step) -> None:
        """Consumed or reclaimed: unpinned slices below leave at once, open ones when they are closed.

        An open one that only the page cache holds is fetched now: soon its object may be gone.
        """
        for held in self.cache.pinned_below(step):
            if not held.ready and not self.spill.holds(held):
                self._agenda.demand(held)
        self.cache.forget_below(step)
        self.spill.forget_below(step)
        self._agenda.forget_below(step)
        if self._priming is not None:
            self._priming.forget_below(step)
        self._notify()

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
        """Bytes of slices that can be at hand at a time, in memory and on disk. Priming keeps a second copy of what
        is not on disk."""
        if self.spill.disk is not None:
            return self.cache.pool.limit + self.spill.disk.limit
        return self.cache.pool.limit // (1 if self._priming is None else 2)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetch in the background until cancelled."""
        async with self._fetcher.serving(), trio.open_nursery() as nursery:
            await nursery.start(self.spill.run)
            task_status.started()
            while True:
                self._wake = trio.Event()
                short = self._start_fetches(nursery)
                poll = short and (self.cache.pool.lingering or self.cache.pool.refused)
                with trio.move_on_after(_MEMORY_POLL_S if poll else float("inf")):
                    await self._wake.wait()

    def _start_fetches(self, nursery: trio.Nursery) -> bool:
        """Start what connections and memory allow; True when memory is what lacks."""
        while self._active < self._connections:
            block = self._agenda.next(prefetch=self._active < self._prefetch_connections)
            self._planned.set()
            self._planned = trio.Event()
            if block is None:
                return False
            buffer = self.cache.lease(block.range.size, block)
            if buffer is None:
                return True
            block.state = State.FETCHING
            self._active += 1
            nursery.start_soon(self._fetch, block, buffer)
        return False

    async def _fetch(self, block: Block, buffer: Buffer) -> None:
        fetched: Buffer | None = None
        try:
            if await self._load(block, buffer):
                fetched = buffer
            else:
                target = Target(await self._store_of(block.entry.tgb.origin), block.entry, block.range)
                fetched = await self._fetcher.fetch(
                    target, buffer, lambda: self.cache.lease(block.range.size, block)
                )
        except StepfsError as error:
            self._failed(block, error)
        finally:
            self._active -= 1
            self._notify()
        if fetched is None:
            return
        if block.state is not State.FETCHING:
            self.cache.pool.give(fetched)  # forgotten meanwhile
            return
        self.cache.ready(block, fetched)
        for owner in block.owners:
            if owner.ready:
                self.spill.offer(owner)
                self.changed()

    async def _load(self, block: Block, buffer: Buffer) -> bool:
        """Fill a block from the disk cache; False if it is not there, or not what it should be."""
        if not self.cache.copied(block):
            return False
        owner = block.owners[0]
        check = Check(block.range, buffer)
        got = await self.spill.load(owner, block.range.offset - owner.ref.offset, buffer.view(), check.landed)
        problem = check.problem(got)
        if problem is None:
            self.counts.disk_hits += 1
            return True
        self.spill.reject(owner, problem)
        return False

    def _failed(self, block: Block, error: StepfsError) -> None:
        if block.state is State.FETCHING:
            if not block.pinned and not isinstance(error, StoreUnreachableError):
                _log.warning("%s", error, extra={"alike": (type(error), str(error))})  # else a reader is told
            self._agenda.failed(block)
            self.cache.fail(block, error)

    async def _store_of(self, origin: int) -> Store:
        if origin == 0:
            return self._store
        if self._origin_store is None:
            raise StepfsError(f"the lake shares data of origin {origin}, which this mount cannot open")
        return await self._origin_store(origin)

    async def ready_block(self, held: HeldSlice, number: int) -> None:
        """Return once block `number` is READY; the caller uses it before its next await."""
        while True:
            block = held.places[number]
            if block is None:
                self._agenda.demand(held)
                self._notify()
                await self._planned.wait()
                continue
            if block.state is State.READY:
                block.read_at = trio.current_time()
                return
            block.waiting += 1
            held.reading = number
            self._notify()
            try:
                await block.settled.wait()
            finally:
                block.waiting -= 1
            if block.error is not None and not isinstance(block.error, StoreUnreachableError):
                raise type(block.error)(*block.error.args)  # a fresh one: its traceback is this reader's

    def close(self, held: HeldSlice) -> None:
        """A handle was closed."""
        self.cache.unpin(held)
        self.spill.unpin(held)
        if not held.pins:
            self._agenda.closed(held)
            if self._priming is not None:
                self._priming.closed(held.key)
            self._notify()

    def changed(self) -> None:
        """Something may go on that could not before."""
        self._notify()
        if self._priming is not None:
            self._priming.changed()

    def _written(self, held: HeldSlice) -> None:
        self.cache.saved(held)
        if held.key in self._primed():
            self.release_copy(held)
        self._notify()

    def _is_last_copy(self, key: Key) -> bool:
        """Whether the daemon's own copy went because this one is on disk."""
        return key in self._primed() and not self.holds(*key)

    def _primed(self) -> Collection[Key]:
        return () if self._priming is None else self._priming.primed

    def _notify(self) -> None:
        self._wake.set()
