"""One to 256 producers in one process and in virtual time: what pace, fairness and lost attempts become at a scale that
no test machine holds.

The store double answers as fast for 256 as for one, so this says nothing of a server's limits; it shows the protocol
alone. Every producer appends at the same rate whatever its pace, so a side's throughput falls only when its attempts
are lost. A run is a function of its seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from trio.testing import MockClock

from bench.report import Report, Row, at_least, at_most, quantile
from bench_ingest.pace import PEAK_SHARE
from bench_ingest.worker import FixedPacer
from stepfs import entropy
from stepfs.format.ids import Step
from stepfs.lake.identity import create_lake
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer
from stepfs_producer.pace import LOAD

EXPOSURE_S = 0.01  # of one attempt against the store double, about
POLL_S = 0.01
DELAY_MAX_S = 600.0  # 256 producers ask for more than the default of 5 s
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # six intervals around the one that the model names
FACTORS_MANY = (1 / 2, 1.0, 2.0)  # beyond 16 producers, where a short interval costs minutes to simulate
FIXED_SHARE_MANY = 0.3  # of the adaptive side's time: throughput and latency need less than fairness
# How often a producer commits in 20 intervals varies by a tenth by chance alone, so 64 of them differ by 1.6: how fair the
# pace is shows only in 200.
SPREAD_AT = 64
WARM_INTERVALS = 6  # what a common start stretches has worn off by then


@dataclass(frozen=True, slots=True)
class Case:
    """One simulated run. `interval_s` None: adaptive."""

    producers: int
    interval_s: float | None
    warm_s: float
    measured_s: float
    rate: float  # appends per second of one producer
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it."""

    producers: int
    interval_s: float | None
    steps_per_s: float
    offered_per_s: float
    p50_s: float
    p99_s: float
    lost_share: float
    commits_per_s: float
    spread: float


def simulate(case: Case) -> Found:
    """Run one case in virtual time."""
    entropy.seed(case.seed)
    return trio.run(_simulate, case, clock=MockClock(autojump_threshold=0))


async def _simulate(case: Case) -> Found:
    shared, clock = ObjectMap(), TrioClock()
    identity = await create_lake(FaultyStore(shared, actor="init"), slices=1, clock=clock)
    reader = await LogReader.open(FaultyStore(shared, actor="reader"), identity)
    due: dict[tuple[str, int], float] = {}
    seen: dict[tuple[str, int], float] = {}
    producers = [_producer(case, shared, clock, number) for number in range(case.producers)]
    begin = trio.current_time() + case.warm_s
    end = begin + case.measured_s
    async with trio.open_nursery() as nursery:
        for producer in producers:
            nursery.start_soon(_feed, producer, case.rate, due)
        nursery.start_soon(_watch, reader, seen)
        await trio.sleep_until(begin)
        before = [asdict(producer.tally) for producer in producers]
        await trio.sleep_until(end)
        after = [asdict(producer.tally) for producer in producers]
        cool_s = 2 * (case.interval_s or case.producers * EXPOSURE_S / LOAD) + 1.0
        await trio.sleep(cool_s)
        nursery.cancel_scope.cancel()
    commits = [late["commits"] - early["commits"] for early, late in zip(before, after, strict=True)]
    lost = sum(late["lost"] - early["lost"] for early, late in zip(before, after, strict=True))
    attempts = sum(late["attempts"] - early["attempts"] for early, late in zip(before, after, strict=True))
    latencies = [seen.get(append, end + cool_s) - when for append, when in due.items() if begin <= when < end]
    return Found(
        producers=case.producers,
        interval_s=case.interval_s,
        steps_per_s=sum(begin <= when < end for when in seen.values()) / case.measured_s,
        offered_per_s=case.rate * case.producers,
        p50_s=quantile(latencies, 0.5),
        p99_s=quantile(latencies, 0.99),
        lost_share=lost / max(attempts, 1),
        commits_per_s=sum(commits) / case.measured_s,
        spread=max(commits) / max(min(commits), 1),
    )


def _producer(case: Case, shared: ObjectMap, clock: TrioClock, number: int) -> AsyncProducer:
    store = FaultyStore(shared, actor=f"p{number}", seed=case.seed)
    pacer = None if case.interval_s is None else FixedPacer(case.interval_s)
    return AsyncProducer(
        "memory://", producer_id=f"p{number}", store=store, clock=clock, pacer=pacer, max_delay=DELAY_MAX_S
    )


async def _feed(producer: AsyncProducer, rate: float, due: dict[tuple[str, int], float]) -> None:
    async with producer:
        await trio.sleep(entropy.uniform(0, 1 / rate))
        while True:
            seq = await producer.append([b"payload"], position=None)
            due[producer.producer_id, seq] = trio.current_time()
            await trio.sleep(1 / rate)


async def _watch(reader: LogReader, seen: dict[tuple[str, int], float]) -> None:
    step = Step(0)
    while True:
        await reader.poll()
        while step < reader.state.next_step:
            entry = await reader.entry(step)
            seen[entry.producer_id, entry.tgb.seq] = trio.current_time()
            step = Step(step + 1)
        await trio.sleep(POLL_S)


def cases(producers: int, commits_each: int) -> list[Case]:
    """The adaptive side and the sweep, long enough for `commits_each` commits per producer at the model's pace."""
    natural_s = max(producers - 1, 1) * EXPOSURE_S / LOAD
    many = producers > 16
    case = partial(Case, producers, warm_s=WARM_INTERVALS * natural_s + 1.0, rate=4 / natural_s)
    measured_s = commits_each * natural_s
    fixed_s = measured_s * (FIXED_SHARE_MANY if many else 1.0)
    return [
        case(interval_s=None, measured_s=measured_s),
        *(
            case(interval_s=natural_s * factor, measured_s=fixed_s)
            for factor in (FACTORS_MANY if many else FACTORS)
        ),
    ]


def run(report: Report, sizes: Sequence[tuple[int, int]]) -> None:
    """`sizes`: (producers, commits per producer) to simulate."""
    wanted = [case for producers, commits in sizes for case in cases(producers, commits)]
    # The dear ones first; two at once is what the machine has cores for.
    with ProcessPoolExecutor(2) as pool:
        done = list(pool.map(simulate, sorted(wanted, key=_cost, reverse=True)))
    report.figures["simulated"] = [asdict(found) for found in done]
    for producers, _ in sizes:
        report.add(*rows(producers, [found for found in done if found.producers == producers]))


def _cost(case: Case) -> float:
    return case.producers / (case.interval_s or case.producers * EXPOSURE_S / LOAD)


def rows(producers: int, found: Sequence[Found]) -> list[Row]:
    ours = next(one for one in found if one.interval_s is None)
    fixed = [one for one in found if one.interval_s is not None]
    peak = max(one.steps_per_s for one in fixed)
    best = min((one for one in fixed if one.steps_per_s >= PEAK_SHARE * peak), key=lambda one: one.p99_s)
    who = f"{producers} simulated"
    named = f"every {best.interval_s:.2f} s: "
    lines = [
        at_least(
            0.9,
            f"steps/s, {who}",
            f"{ours.steps_per_s:.1f}",
            f"{named}{best.steps_per_s:.1f}",
            ours.steps_per_s / best.steps_per_s,
        ),
        at_most(
            2.0,
            f"append → visible p99, {who}",
            f"{ours.p99_s:.2f} s",
            f"{named}{best.p99_s:.2f} s",
            ours.p99_s / best.p99_s,
        ),
        Row(
            f"lost attempts, {who}",
            f"{ours.lost_share:.1%}",
            f"{named}{best.lost_share:.1%}",
            None,
            "≤ 25 %",
            ours.lost_share <= 0.25,
        ),
    ]
    if producers == SPREAD_AT:
        what = f"commits per producer, most ÷ least, {who}"
        lines.append(at_most(1.2, what, f"{ours.spread:.2f}", f"{named}{best.spread:.2f}", ours.spread))
    return lines
