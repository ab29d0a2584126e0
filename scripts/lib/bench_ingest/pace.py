"""Real producer processes on a real server: adaptive pace against a sweep of fixed intervals and a commit per batch.

Every side gets slots of equal length in every round, in an order drawn afresh, each on a lake of its own, with the same
offered load: half of what the machine and the server manage when sixteen processes do nothing but put. The best
fixed interval is known only after the sweep: the one with the least p99 latency among those that reach 95 % of the
sweep's greatest throughput.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import trio

from bench.report import Report, Row, at_least, at_most, busy_share, cpu_ticks, median, quantile
from bench_ingest.worker import SLICES, Order, monotonic
from bench_ingest.worker_processes import Worker, workers
from stepfs.errors import StoreUnreachableError
from stepfs.format.ids import Step
from stepfs.lake.identity import create_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store

POLL_S = 0.005
INTERVALS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
PEAK_SHARE = 0.95
CALIBRATION_S = 4.0
OFFERED_SHARE = 0.5
START_S = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    producers: tuple[int, ...] = (1, 4, 16)
    intervals_s: tuple[float, ...] = INTERVALS_S
    seconds: float = 20.0  # per side and number of producers, over all rounds
    rounds: int = 3
    warm_s: float = 3.0
    cool_s: float = 3.0
    slice_bytes: int = 1024
    rate: float = 0.0  # steps per second offered by all producers together; 0: find out


@dataclass(frozen=True, slots=True)
class Slot:
    """One side measured once."""

    producers: int
    pacing: str | float
    steps_per_s: float
    p50_s: float
    p99_s: float
    lost_share: float
    commits_per_s: float
    spread: float  # most commits of one producer over the least
    busy: float


@dataclass(frozen=True, slots=True)
class Side:
    """The medians of one side's slots."""

    pacing: str | float
    steps_per_s: float
    p50_s: float
    p99_s: float
    lost_share: float
    commits_per_s: float
    spread: float

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> Side:
        def middle(name: str) -> float:
            return median([getattr(slot, name) for slot in slots])

        names = ("steps_per_s", "p50_s", "p99_s", "lost_share", "commits_per_s", "spread")
        return cls(slots[0].pacing, *map(middle, names))


async def calibrate(crew: Sequence[Worker], url: str, plan: Plan) -> float:
    """Steps per second when everybody only puts."""
    for number, worker in enumerate(crew):
        order = Order(url, f"raw-{number}", "put", 1.0, plan.slice_bytes, 0.0, CALIBRATION_S, 0.0)
        await worker.tell(asdict(order))
    for worker in crew:
        await worker.hear()
    go = monotonic() + START_S
    for worker in crew:
        await worker.tell({"go": go})
    puts = [(await worker.hear())["puts"] for worker in crew]
    return float(sum(puts) / CALIBRATION_S)


async def measure(crew: Sequence[Worker], url: str, pacing: str | float, rate: float, plan: Plan) -> Slot:
    """One slot on a fresh lake."""
    store = open_store(url)
    try:
        identity = await create_lake(store, slices=SLICES)
        measured_s = plan.seconds / plan.rounds
        for number, worker in enumerate(crew):
            order = Order(
                url, f"p{number}", pacing, rate / len(crew), plan.slice_bytes, plan.warm_s, measured_s, plan.cool_s,
            )  # fmt: skip
            await worker.tell(asdict(order))
        for worker in crew:
            await worker.hear()
        reader = await LogReader.open(store, identity)
        seen: dict[tuple[str, int], float] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, reader, seen)
            go = monotonic() + START_S
            for worker in crew:
                await worker.tell({"go": go})
            await trio.sleep(START_S + plan.warm_s)
            before = cpu_ticks()
            await trio.sleep(measured_s)
            busy = busy_share(before, cpu_ticks())
            answers = [await worker.hear() for worker in crew]
            nursery.cancel_scope.cancel()
    finally:
        await store.aclose()
    window = (go + plan.warm_s, go + plan.warm_s + measured_s)
    return _evaluate(pacing, answers, seen, window, monotonic(), busy)


async def _watch(reader: LogReader, seen: dict[tuple[str, int], float]) -> None:
    """When each append became visible to a reader that polls."""
    step = Step(0)
    while True:
        with suppress(StoreUnreachableError):
            await reader.poll()
        now = monotonic()
        while step < reader.state.next_step:
            entry = reader.entry_if_loaded(step)
            assert entry is not None
            seen[entry.producer_id, entry.tgb.seq] = now
            step = Step(step + 1)
        await trio.sleep(POLL_S)


def _evaluate(
    pacing: str | float,
    answers: Sequence[dict[str, Any]],
    seen: dict[tuple[str, int], float],
    window: tuple[float, float],
    ended: float,
    busy: float,
) -> Slot:
    """What was never seen counts as seen when the slot ended: it waited at least that long."""
    begin, end = window
    latencies = [
        seen.get((f"p{number}", answer["first_seq"] + offset), ended) - due
        for number, answer in enumerate(answers)
        for offset, due in enumerate(answer["due"])
        if begin <= due < end
    ]
    grown = [
        {name: answer["tallies"][1][name] - answer["tallies"][0][name] for name in answer["tallies"][0]}
        for answer in answers
    ]
    commits = [tally["commits"] for tally in grown]
    attempts = sum(tally["attempts"] for tally in grown)
    return Slot(
        producers=len(answers),
        pacing=pacing,
        steps_per_s=sum(_rate(f"p{number}", seen, window, ended) for number in range(len(answers))),
        p50_s=quantile(latencies, 0.5),
        p99_s=quantile(latencies, 0.99),
        lost_share=sum(tally["lost"] for tally in grown) / max(attempts, 1),
        commits_per_s=sum(commits) / (end - begin),
        spread=max(commits) / max(min(commits), 1),
        busy=busy,
    )


def _rate(name: str, seen: dict[tuple[str, int], float], window: tuple[float, float], ended: float) -> float:
    """Steps per second of one producer, from its last commit before the window to its first one after it: whole
    commits, or a window that happens to hold one more of them would credit a long interval with steps it never made.
    """
    times = sorted(when for (who, _), when in seen.items() if who == name)
    begin = max((when for when in times if when < window[0]), default=window[0])
    end = min((when for when in times if when >= window[1]), default=ended)
    return sum(begin < when <= end for when in times) / (end - begin)


def best_fixed(sides: Sequence[Side]) -> Side:
    """The least p99 among those that reach 95 % of the greatest throughput."""
    peak = max(side.steps_per_s for side in sides)
    able = [side for side in sides if side.steps_per_s >= PEAK_SHARE * peak]
    return min(able, key=lambda side: side.p99_s)


async def run(report: Report, bucket_url: str, plan: Plan) -> None:
    """Measure all of it; rows and figures go to the report."""
    async with workers(max(plan.producers)) as crew:
        rate = plan.rate
        if not rate:
            limit = await calibrate(crew, f"{bucket_url}/calibration", plan)
            rate = limit * OFFERED_SHARE
            what = f"limit: puts/s of {SLICES * plan.slice_bytes} B by {len(crew)} processes, nothing else"
            report.add(Row(what, f"{limit:.0f}"))
        report.figures["pace"] = {"offered_per_s": rate, "slots": []}
        report.add(Row("steps/s offered to every side", f"{rate:.0f}"))
        for count in plan.producers:
            sides = await _sweep(report, crew[:count], bucket_url, rate, plan)
            report.add(*rows(count, sides))


async def _sweep(report: Report, crew: Sequence[Worker], bucket_url: str, rate: float, plan: Plan) -> list[Side]:
    """All sides in every round; the adaptive one first in the result, a commit per batch last if it was measured."""
    pacings: list[str | float] = ["dac", *plan.intervals_s]
    if len(crew) == max(plan.producers) and len(crew) > 1:
        pacings.append("each")
    slots: dict[str | float, list[Slot]] = {pacing: [] for pacing in pacings}
    for number in range(plan.rounds):
        for pacing in random.Random(number).sample(pacings, len(pacings)):
            url = f"{bucket_url}/pace-{len(crew)}-{number}-{pacing}"
            slot = await measure(crew, url, pacing, rate, plan)
            slots[pacing].append(slot)
            report.figures["pace"]["slots"].append(asdict(slot))
            report.say(
                f"{len(crew)} producers, {pacing}: {slot.steps_per_s:.0f} steps/s, p50 {slot.p50_s:.3f} s, "
                f"p99 {slot.p99_s:.3f} s, {slot.lost_share:.0%} lost, {slot.commits_per_s:.1f} commits/s, "
                f"machine {slot.busy:.0%} busy"
            )
    return [Side.of(found) for found in slots.values()]


def rows(count: int, sides: Sequence[Side]) -> list[Row]:
    """The lines of the table for one number of producers."""
    ours = sides[0]
    best = best_fixed([side for side in sides if not isinstance(side.pacing, str)])
    who = f"{count} producer{'s' * (count > 1)}"
    named = f"every {best.pacing:g} s: "
    found = [
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
            f"{ours.p99_s:.3f} s (p50 {ours.p50_s:.3f})",
            f"{named}{best.p99_s:.3f} s (p50 {best.p50_s:.3f})",
            ours.p99_s / best.p99_s,
        ),
        at_most(
            25,
            f"lost attempts, {who}",
            f"{ours.lost_share:.1%}",
            f"{named}{best.lost_share:.1%}",
            100 * ours.lost_share,
            "%",
        ),
    ]
    if sides[-1].pacing == "each":
        each = sides[-1]
        ratio = ours.steps_per_s / max(each.steps_per_s, 1e-9)
        found.append(
            at_least(
                3.0,
                f"steps/s, {who}",
                f"{ours.steps_per_s:.1f}",
                f"commit per batch: {each.steps_per_s:.1f} ({each.lost_share:.0%} lost)",
                ratio,
            )
        )
    return found
