"""`.stepfs/metrics` and the scrape port: this mount's metrics in Prometheus' text format.

`scrape` serves them in threads of its own beside the loop, so collections are copied before they are iterated.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from stepfs import __version__
from stepfs._internal.histogram import SECONDS, Histogram
from stepfs.data.counters import HELP, METRICS, DataCounts
from stepfs.data.waiting import Cause
from stepfs.store.api import Counts

if TYPE_CHECKING:
    from stepfs.mount.fuse.guard import Meter

Facts = Mapping[str, Any]  # `Reports.facts`

GAUGES: Final[Mapping[str, tuple[str, Callable[[Facts], float]]]] = {
    "frontier_step": ("Newest committed step known here; -1 before the first", lambda facts: facts["frontier"]),
    "first_step": ("Oldest step that can be opened", lambda facts: facts["first_step"]),
    "last_read_step": (
        "Step whose file was opened last; -1 before the first",
        lambda facts: -1 if facts["last_step"] is None else facts["last_step"],
    ),
    "sealed": ("1 once no more steps will come", lambda facts: facts["sealed"]),
    "newest_commit_timestamp_seconds": (
        "When the newest commit was made, by its producer's clock",
        lambda facts: facts["time"] or 0,
    ),
    "live_bytes": (
        "Payload bytes of the steps that are committed and not reclaimed",
        lambda facts: facts["live_bytes"],
    ),
    "poll_interval_seconds": (
        "Current interval between looks for new steps",
        lambda facts: facts["store"]["poll_interval_s"],
    ),
    "store_up": (
        "1 if the last look at the store succeeded",
        lambda facts: facts["store"]["trouble"] is None or facts["store"]["upgrade_needed"],
    ),
    "upgrade_needed": (
        "1 while a later version writes what this one cannot read",
        lambda facts: facts["store"]["upgrade_needed"],
    ),
    "waiting_requests": ("File system requests waiting for a commit", lambda facts: facts["waiting"]),
    "open_files": ("Files open now", lambda facts: facts["open_files"]),
    "known_directories": ("Step directories the kernel holds", lambda facts: facts["known_directories"]),
    "cache_memory_bytes": (
        "Bytes of slices in memory, primed pages included",
        lambda facts: facts["cache"]["memory_bytes"],
    ),
    "cache_memory_limit_bytes": ("The budget for them", lambda facts: facts["cache"]["memory_limit_bytes"]),
    "disk_bytes": ("Bytes of slices in the disk cache", lambda facts: facts["cache"]["disk_bytes"]),
    "disk_limit_bytes": (
        "The budget for them; 0 without a disk cache",
        lambda facts: facts["cache"]["disk_limit_bytes"],
    ),
    "connections_limit": (
        "Ranged GETs of slices under way at a time, at most, as the store bears now",
        lambda facts: facts["store"]["connections"],
    ),
}


@dataclass(frozen=True, eq=False, slots=True)
class MountCollector(Collector):
    """Reads the counters at each scrape; stores none itself."""

    meter: Meter
    store: Counts
    data: DataCounts
    facts: Callable[[], Facts]
    waits: Mapping[tuple[str, Cause], Histogram]  # `Ledger.durations`
    lag: Histogram  # seconds from commit to sight
    info: Mapping[str, str]  # constant labels that tell this mount from others

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("stepfs_build", "The program", value={"version": __version__})
        yield InfoMetricFamily("stepfs_mount", "What is mounted", value=dict(self.info))
        yield from self._requests()
        yield from self._times()
        store = CounterMetricFamily("stepfs_store_requests", "Requests sent to the object store", labels=["verb"])
        for verb in ("get", "create", "put", "list", "delete"):
            store.add_metric([verb], getattr(self.store, verb))
        yield store
        yield CounterMetricFamily("stepfs_store_read_bytes", "Bytes from the store", value=self.store.bytes_read)
        for name, value in self.data.as_dict().items():
            yield CounterMetricFamily(f"stepfs_data_{METRICS[name]}", HELP[name], value=value)
        facts = self.facts()
        yield CounterMetricFamily(
            "stepfs_handovers", "Daemons of this mount that gave it to the next one", value=facts["handovers"]
        )
        yield CounterMetricFamily(
            "stepfs_recoveries", "Daemons started because the one before had died", value=facts["recoveries"]
        )
        for name, (text, level) in GAUGES.items():
            yield GaugeMetricFamily(f"stepfs_{name}", text, value=float(level(facts)))
        held = GaugeMetricFamily(
            "stepfs_held_steps", "Steps since the need of the group that holds data longest", labels=["holder"]
        )
        if facts["holder"] is not None:
            held.add_metric([facts["holder"]], facts["held_steps"])
        yield held
        yield GaugeMetricFamily("stepfs_start_timestamp_seconds", "When the mount started", value=self.meter.started_at)

    def _requests(self) -> Iterator[Metric]:
        meter = self.meter
        requests = CounterMetricFamily("stepfs_requests", "File system requests", labels=["operation"])
        for operation, count in sorted(meter.requests.copy().items()):
            requests.add_metric([operation], count)
        yield requests
        errors = CounterMetricFamily("stepfs_request_errors", "Requests that failed", labels=["operation", "errno"])
        for (operation, code), count in sorted(meter.errors.copy().items()):
            errors.add_metric([operation, errno.errorcode.get(code, str(code))], count)
        yield errors
        yield CounterMetricFamily("stepfs_handler_faults", "Unexpected exceptions: bugs", value=meter.faults)
        yield CounterMetricFamily("stepfs_read_bytes", "Bytes given to readers", value=meter.bytes_read)
        yield CounterMetricFamily(
            "stepfs_invalidated_steps", "Step names withdrawn from the kernel", value=meter.steps_invalidated
        )
        yield CounterMetricFamily(
            "stepfs_waited_seconds", "Time in which some request was under way", value=meter.waited.seconds()
        )

    def _times(self) -> Iterator[Metric]:
        durations = {(operation,): each for operation, each in self.meter.durations.copy().items()}
        yield _family("stepfs_request_seconds", "Time to answer a file system request", ["operation"], durations)
        waited = "Waiting of readers, by what for and by what has caused it"
        yield _family("stepfs_reader_wait_seconds", waited, ["for", "cause"], self.waits)
        yield _family("stepfs_fetch_seconds", "One GET of a slice", [], {(): self.data.fetch_seconds})
        yield _family(
            "stepfs_commit_visible_seconds",
            "From a commit, by its producer's clock, until it is seen here",
            [],
            {(): self.lag},
        )


def _family(name: str, text: str, labels: Sequence[str], histograms: Mapping[Any, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in sorted(dict(histograms).items()):
        bounds = (*(f"{bound:g}" for bound in SECONDS), "+Inf")
        buckets = list(zip(bounds, histogram.cumulative(), strict=True))
        family.add_metric(values, buckets, histogram.sum)
    return family


def registry_of(collector: MountCollector) -> CollectorRegistry:
    """A registry with this mount in it, and the memory, CPU and descriptors of its process, as `process_…`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> str:
    """The text exposition format."""
    return generate_latest(registry).decode()
