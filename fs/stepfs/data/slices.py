"""The slices of one mount or reader, put together from the rooms beside this file.

File handles use `reads`; the prefetcher requests slices, the primer follows them, reports read facts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import trio

from stepfs.data.blocks import Block, HeldSlice
from stepfs.data.buffers import Pool
from stepfs.data.cache.disk import DiskCache
from stepfs.data.cache.memory import Cache
from stepfs.data.cache.reading_order import ReadingOrder
from stepfs.data.cache.write_behind import WriteBehind
from stepfs.data.counters import DataCounts
from stepfs.data.fetch.concurrency import ConcurrencyLimit
from stepfs.data.fetch.fetcher import Fetcher, StoreOf
from stepfs.data.loading import BlockLoader
from stepfs.data.protocols import Priming
from stepfs.data.queue import FetchQueue, PrefetchRequest
from stepfs.data.reads import SliceReads
from stepfs.data.roles import Role
from stepfs.data.sources import Sources
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, SliceKey, Step
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
        origin_store: StoreOf | None = None,
        opened_are_kept: bool = False,
        peers: int = 1,
    ) -> None:
        """`memory_bytes`: the one budget for bytes in memory. `disk`: a second layer behind it. `concurrency` bounds the
        GETs under way. `origin_store` opens the store of a fork's parent (descriptors with `origin` > 0). `opened_are_kept`:
        the store keeps the objects of steps from `forget_below` upwards, so open files without readers may leave memory.
        `peers`: how many readers open each slice, one behind the other."""
        self.counts = DataCounts()
        self.disk_copies = WriteBehind(disk, self.counts, self._written, self._is_pinned, self._is_last_copy)
        self.cache = Cache(Pool(memory_bytes), self.counts, self.disk_copies.holds)
        self._priming = Priming()
        self._queue = FetchQueue(self.cache, self.disk_copies.holds, self._primed)
        concurrency = concurrency or ConcurrencyLimit()
        self._fetcher = Fetcher(self.cache.pool, self.counts, deadline_s=deadline_s, concurrency=concurrency)
        sources = Sources(self.cache, self.disk_copies, self.counts, self._fetcher, store, origin_store)
        self._loader = BlockLoader(self.cache, self._queue, sources, concurrency=concurrency, loaded=self._loaded)
        self.reads = SliceReads(
            cache=self.cache,
            disk_copies=self.disk_copies,
            queue=self._queue,
            loader=self._loader,
            priming=lambda: self._priming,
            counts=self.counts,
            deadline_s=deadline_s,
            opened_are_kept=opened_are_kept,
            peers=peers,
        )
        self._disk = disk
        self._copies = 1  # in memory, of a slice fetched ahead: priming without a disk keeps a second one

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
        self.reads.make_idle()
        self.changed()

    @property
    def requested(self) -> list[PrefetchRequest]:
        """The slices that will be opened next, nearest first."""
        return self._queue.prefetch_requests

    def replan(self) -> None:
        """Plan the requests afresh: slices that were counted as primed have left the page cache."""
        self._queue.replan()
        self.reads.make_idle()
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

    def release_copy(self, held: HeldSlice) -> None:
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
        self.reads.hold(held for held in self.cache.opened() if held.entry.step < step)
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
        """GETs that may be under way together, as learned."""
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
        """Bytes used of memory and disk, and their limits."""
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

    def _written(self, held: HeldSlice) -> None:
        self.cache.saved(held)
        if held.key in self._primed():
            self.release_copy(held)
        self._loader.notify()

    def _is_pinned(self, key: SliceKey) -> bool:
        return self.cache.is_pinned(key)

    def _is_last_copy(self, key: SliceKey) -> bool:
        """Whether the copy on disk is the only one: primed pages replaced the copy in memory."""
        return key in self._primed() and not self.holds(*key)

    def _primed(self) -> Collection[SliceKey]:
        return self._priming.primed
