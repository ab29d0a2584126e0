"""What pacing costs at 16 to 1,000 producers and 10 to 100 ms of exposure: the discrete-event model
of tests/support/pacemodel.py around the real `Pacer`.

All producers start together, never run out of batches, and keep the default `max_delay`. A quarter of the run is warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

from pacemodel import Model, around

from bench.report import Report, Row
from stepfs_producer.pace import interval_s
from stepfs_producer.settings import MAX_DELAY_S

PRODUCERS = (16, 64, 100, 256, 1000)
EXPOSURES_S = (0.01, 0.05, 0.1)
BATCHES_PER_INTERVAL = 4
ATTEMPTS_MAX = 16_000  # of all producers together, about: what a minute of one core simulates
INTERVALS = (12, 60)


@dataclass(frozen=True, slots=True)
class Paced:
    """One cell of the table. Seconds; waits are from append to commit."""

    producers: int
    exposure_s: float
    interval_s: float
    lost_share: float
    attempts_per_s: float
    p50_s: float
    p99_s: float
    longest_s: float
    commits_least: int
    commits_most: int
    started_s: float  # until the last of those that start together is in the log
    start_attempts_each: float


def cell(producers: int, exposure_s: float) -> Paced:
    natural_s = interval_s(producers - 1, exposure_s)
    intervals = min(INTERVALS[1], max(INTERVALS[0], ATTEMPTS_MAX // producers))
    periods_s = [natural_s / BATCHES_PER_INTERVAL] * producers
    model = Model(periods_s, around(exposure_s), delay_max_s=MAX_DELAY_S, seed=producers, start_together=True)
    result = model.run(intervals * natural_s)
    commits = [node.commits for node in result.nodes]
    return Paced(
        producers=producers,
        exposure_s=exposure_s,
        interval_s=natural_s,
        lost_share=result.lost_share,
        attempts_per_s=result.attempts_per_s,
        p50_s=result.wait_s(0.5),
        p99_s=result.wait_s(0.99),
        longest_s=result.wait_s(1.0),
        commits_least=min(commits),
        commits_most=max(commits),
        started_s=result.started_s,
        start_attempts_each=result.start_attempts / producers,
    )


def run(report: Report, producers: Sequence[int] = PRODUCERS) -> None:
    wanted = [(count, exposure_s) for count in producers for exposure_s in EXPOSURES_S]
    dear_first = sorted(wanted, reverse=True)
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(dear_first, pool.map(cell, *zip(*dear_first, strict=True)), strict=True))
    report.figures["paced"] = [asdict(found[one]) for one in wanted]
    for one in wanted:
        report.add(row(found[one]))


def row(found: Paced) -> Row:
    return Row(
        f"lost attempts, {found.producers} modelled, {found.exposure_s * 1000:.0f} ms",
        f"{found.lost_share:.1%}",
        f"longest wait {found.longest_s / found.interval_s:.1f} T",
        None,
        "≤ 25 %, ≤ 2 T",
        found.lost_share <= 0.25 and found.longest_s <= 2 * found.interval_s,
    )
