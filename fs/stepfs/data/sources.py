"""Where the bytes of a block come from: the disk cache, else the store."""

from __future__ import annotations

from dataclasses import dataclass

from stepfs.data.blocks import Block
from stepfs.data.buffers import Buffer
from stepfs.data.cache.memory import Cache
from stepfs.data.cache.write_behind import WriteBehind
from stepfs.data.counters import DataCounts
from stepfs.data.fetch.checksum import RangeCheck
from stepfs.data.fetch.fetcher import Fetcher, FetchTarget, StoreOf
from stepfs.errors import StepfsError
from stepfs.format.tgb import Descriptor
from stepfs.store.api import Store


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
