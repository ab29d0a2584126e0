"""Where the bytes of a block come from: the disk cache, else the store. Asked in this order, one answer is enough."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from stepfs.data.blocks import Block
from stepfs.data.buffers import Buffer
from stepfs.data.cache.memory import Cache
from stepfs.data.cache.write_behind import WriteBehind
from stepfs.data.counters import DataCounts
from stepfs.data.fetch.checksum import RangeCheck
from stepfs.data.fetch.fetcher import Fetcher, FetchTarget
from stepfs.errors import StepfsError
from stepfs.store.api import Store

OriginStore = Callable[[int], Awaitable[Store]]


class Source(Protocol):
    """A place that may have the bytes of a block."""

    async def load(self, block: Block, buffer: Buffer) -> Buffer | None:
        """The verified bytes, in `buffer` or in another one in its place; None leaves `buffer` to the caller.

        Any exception consumes `buffer`.
        """
        ...


class DiskSource:
    """The disk cache. A damaged file is removed, and the next source is used."""

    def __init__(self, disk_copies: WriteBehind, cache: Cache, counts: DataCounts) -> None:
        self._disk_copies = disk_copies
        self._cache = cache
        self._counts = counts

    async def load(self, block: Block, buffer: Buffer) -> Buffer | None:
        if not self._cache.copied(block):
            return None
        owner = block.owners[0]
        check = RangeCheck(block.range, buffer)
        got = await self._disk_copies.load(
            owner, block.range.offset - owner.ref.offset, buffer.view(), check.update
        )
        problem = check.problem(got)
        if problem is None:
            self._counts.disk_hits += 1
            return buffer
        self._disk_copies.reject(owner, problem)
        return None


class StoreSource:
    """The store of the lake, or for data of a fork's parent (`origin` > 0) the store of that origin."""

    def __init__(
        self, fetcher: Fetcher, cache: Cache, store: Store, origin_store: OriginStore | None
    ) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._store = store
        self._origin_store = origin_store

    async def load(self, block: Block, buffer: Buffer) -> Buffer:
        target = FetchTarget(await self._store_of(block.entry.tgb.origin), block.entry, block.range)
        return await self._fetcher.fetch(target, buffer, lambda: self._cache.lease(block.range.size, block))

    async def _store_of(self, origin: int) -> Store:
        if origin == 0:
            return self._store
        if self._origin_store is None:
            raise StepfsError(f"the lake shares data of origin {origin}, which this mount cannot open")
        return await self._origin_store(origin)
