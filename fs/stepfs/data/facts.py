"""Read-only facts of the data rooms, for the prefetcher, reports and metrics."""

from __future__ import annotations

from stepfs.data.cache.disk import DiskCache
from stepfs.data.cache.memory import Cache
from stepfs.data.fetch.fetcher import Fetcher
from stepfs.data.reads import SliceReads
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step


class DataFacts:
    """Read-only."""

    def __init__(self, cache: Cache, disk: DiskCache | None, fetcher: Fetcher, reads: SliceReads) -> None:
        self.copies = 1  # in memory, of a slice fetched ahead: priming without a disk keeps a second one
        self._cache = cache
        self._disk = disk
        self._fetcher = fetcher
        self._reads = reads

    def holds(self, step: Step, index: SliceIndex) -> bool:
        """Whether every byte of the slice is in memory, verified."""
        held = self._cache.get(step, index)
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
    def slice_bytes(self) -> int:
        """Mean length of the slices opened so far, 0 before the first."""
        return self._reads.opened_bytes // max(1, self._reads.opens)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of slices that fit in memory and on disk together."""
        memory = self._cache.pool.limit
        return memory // self.copies if self._disk is None else memory + self._disk.limit

    def budgets(self) -> dict[str, int]:
        """Bytes used of memory and disk, and their limits."""
        pool, disk = self._cache.pool, self._disk
        return {
            "memory_bytes": pool.used,
            "memory_limit_bytes": pool.limit,
            "disk_bytes": 0 if disk is None else disk.used,
            "disk_limit_bytes": 0 if disk is None else disk.limit,
        }
