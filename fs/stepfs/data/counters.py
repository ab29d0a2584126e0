"""Counters of the data rooms, as plain numbers: exact, so that tests guard performance without a stopwatch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from stepfs.histogram import Histogram


@dataclass(slots=True)
class DataCounts:
    """Monotonic counters of one mount; bytes unless the name has another unit. Exported by `stepfs.mount`."""

    requests: int = 0  # ranged GETs sent, hedges and retries included
    bytes_fetched: int = 0  # received from the store
    bytes_delivered: int = 0  # given to readers, and primed into the page cache for them
    hits: int = 0  # opens that found every byte in memory
    misses: int = 0  # opens that had to wait for the store or the disk
    hedges: int = 0  # second requests sent because the first was slow
    hedges_won: int = 0
    retries: int = 0  # requests repeated after a transient error
    corrupt: int = 0  # blocks that failed their checksum, first attempts included
    evicted: int = 0  # blocks dropped to make room
    primed: int = 0  # bytes pushed into the page cache
    primed_files: int = 0
    reprimed_files: int = 0  # pushed again because the kernel had dropped pages
    disk_hits: int = 0  # blocks loaded from the disk cache
    disk_written: int = 0  # bytes
    adopted_files: int = 0  # found on disk at start, left by a crashed mount
    fetch_seconds: Histogram = field(default_factory=Histogram)  # GETs that delivered
    wait_seconds: Histogram = field(default_factory=Histogram)  # reads that had to wait for their bytes

    def as_dict(self) -> dict[str, int]:
        """The counters alone."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in values if isinstance(value, int)}
