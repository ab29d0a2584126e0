"""Counters of the data rooms, as plain numbers: exact, so that tests guard performance without a stopwatch."""

from dataclasses import dataclass, field, fields
from typing import Any

from stepfs._internal.histogram import Histogram


def _counter(text: str, metric: str | None = None) -> Any:
    """`metric`: its name there, if that says more: what is counted stands last."""
    return field(default=0, metadata={"help": text, "metric": metric})


@dataclass(slots=True)
class DataCounts:
    """Monotonic counters of one mount, each with its help text in the metrics of `stepfs.mount`."""

    requests: int = _counter("Ranged GETs sent for slices, hedges and retries included")
    bytes_fetched: int = _counter("Bytes of slices received from the store", "fetched_bytes")
    bytes_delivered: int = _counter(
        "Bytes of slices given to readers, and primed into the page cache for them", "delivered_bytes"
    )
    hits: int = _counter("Opens that found every byte at hand")
    misses: int = _counter("Opens that had to wait for the store or the disk")
    hedges: int = _counter("Second requests sent because the first was slow")
    hedges_won: int = _counter("Second requests that were faster")
    retries: int = _counter("Requests repeated after a transient error")
    corrupt: int = _counter("Blocks that failed their checksum, first attempts included", "corrupt_blocks")
    evicted: int = _counter("Blocks dropped to make room", "evicted_blocks")
    primed: int = _counter("Bytes pushed into the page cache", "primed_bytes")
    primed_files: int = _counter("Files pushed into the page cache")
    reprimed_files: int = _counter("Files pushed again because the kernel had dropped pages")
    near_hits: int = _counter("Blocks read from the nearer place")
    near_bytes: int = _counter("Bytes of blocks read from the nearer place")
    near_absent: int = _counter("Requests for blocks that the nearer place did not have")
    near_corrupt: int = _counter("Blocks that failed their checksum at the nearer place")
    near_failed: int = _counter("Requests that the nearer place refused, or did not answer in time")
    disk_hits: int = _counter("Blocks loaded from the disk cache")
    disk_written: int = _counter("Bytes written to the disk cache", "disk_written_bytes")
    adopted_files: int = _counter("Files found in the disk cache at start, left by a crashed mount")
    fetch_seconds: Histogram = field(default_factory=Histogram)  # GETs that delivered

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in HELP}


HELP = {each.name: each.metadata["help"] for each in fields(DataCounts) if each.metadata}
METRICS = {each.name: each.metadata["metric"] or each.name for each in fields(DataCounts) if each.metadata}
