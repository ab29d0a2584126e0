"""A running plan as Prometheus metrics, read from the scrape's thread.

Shares are counters of tokens by source, given and wanted, so any window of them can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from stepfs_producer.engine.api import Engine
from stepfs_producer.run.pipeline import Pipeline
from stepfs_producer.run.results import PlanTotals

_PREFIX: Final = "stepfs_produce_"


@dataclass(frozen=True, eq=False)
class PlanMetrics(Collector):
    """Metrics of one run."""

    info: Mapping[str, str]  # lake, producer id and plan
    totals: PlanTotals
    pipeline: Pipeline
    engine: Engine
    memory_bytes: int

    def collect(self) -> Iterator[Metric]:
        totals = self.totals
        run = InfoMetricFamily(_PREFIX + "run", "What runs")
        run.add_metric([], dict(self.info))
        yield run
        yield GaugeMetricFamily(_PREFIX + "next_step", "Step of the plan that comes next", totals.state.step)
        yield CounterMetricFamily(_PREFIX + "steps", "Steps appended by this run", totals.steps)
        yield CounterMetricFamily(_PREFIX + "tokens", "Tokens in them, padding not counted", totals.tokens)
        yield CounterMetricFamily(_PREFIX + "room_tokens", "Tokens that they could hold", totals.room)
        yield CounterMetricFamily(
            _PREFIX + "planning_seconds",
            "Time the planner took for them, waiting not counted",
            totals.planning_s,
        )
        yield CounterMetricFamily(
            _PREFIX + "slowest_to_mean_ratio",
            "Sum over steps of the cost of the slowest rank by the mean rank's",
            totals.slowest[""][0],
        )
        yield CounterMetricFamily(_PREFIX + "workers_died", "Workers that died", self.engine.died)
        tasks = self.pipeline.tasks
        yield CounterMetricFamily(_PREFIX + "late_tasks", "Tasks that a spare worker tried as well", tasks.late)
        yield CounterMetricFamily(
            _PREFIX + "lost_bodies", "Results kept by workers that were lost, and made again", tasks.lost
        )
        yield GaugeMetricFamily(_PREFIX + "kept_bytes", "Bytes of results kept by workers", self.engine.kept_bytes)
        yield GaugeMetricFamily(_PREFIX + "memory_limit_bytes", "Bytes that the run may use", self.memory_bytes)
        yield CounterMetricFamily(_PREFIX + "task_seconds", "Seconds that workers worked", tasks.seconds)
        yield GaugeMetricFamily(_PREFIX + "workers", "Tasks that run at a time", tasks.workers)
        yield self._waited()
        yield from self._of_sources()

    def _waited(self) -> Metric:
        waited = CounterMetricFamily(
            _PREFIX + "waited_seconds",
            "What the run waited for, by cause; the time of store includes that of trainers",
            labels=["cause", "source"],
        )
        for (cause, source), seconds in list(self.pipeline.waits.seconds.items()):
            waited.add_metric([cause, source], seconds)
        return waited

    def _of_sources(self) -> Iterator[Metric]:
        given = CounterMetricFamily(_PREFIX + "source_tokens", "Tokens by source", labels=["source"])
        wanted = CounterMetricFamily(
            _PREFIX + "source_wanted_tokens", "Tokens that the mix wants of it", labels=["source"]
        )
        skipped = CounterMetricFamily(
            _PREFIX + "source_skipped_records", "Records that could not be decoded", labels=["source"]
        )
        ahead = GaugeMetricFamily(_PREFIX + "source_ahead_tokens", "Tokens held ahead", labels=["source"])
        held = GaugeMetricFamily(_PREFIX + "source_ahead_bytes", "Bytes of samples and blocks held", labels=["source"])
        wishes = dict(self.totals.wanted)
        for name, one in self.totals.sources().items():
            given.add_metric([name], one["tokens"])
            wanted.add_metric([name], wishes.get(name, 0.0))
            skipped.add_metric([name], one["skipped"])
        for name, loader in self.pipeline.loaders.items():
            ahead.add_metric([name], loader.held.tokens)
            held.add_metric([name], loader.held.nbytes + loader.block_bytes)
        yield from (given, wanted, skipped, ahead, held)
