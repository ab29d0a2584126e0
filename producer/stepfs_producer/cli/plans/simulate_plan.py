"""One simulation of `stepfs-produce simulate`, and its report: a page, or a JSON document."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from stepfs.cli.columns import printable, table
from stepfs.format.ids import JSON_SCHEMA
from stepfs_producer.cli.plans.plan_summary import showing_plan
from stepfs_producer.engine.local import local_engine
from stepfs_producer.roles.preload import find_modules_in, preload
from stepfs_producer.run.memory import memory_of
from stepfs_producer.run.prepare import LocatedPlan, list_sources, plan_at, prepare_plan
from stepfs_producer.run.simulation import Simulation
from stepfs_producer.run.totals import BAD_SHOWN, BadRecord, PlanTotals


@dataclass(frozen=True, slots=True)
class _Simulated:
    plan: str
    totals: PlanTotals
    reason: str
    seconds: float


def simulate_plan(path: Path, *, steps: int, workers: int | None, held_out: bool, as_json: bool) -> str:
    """The report on the first steps of the plan in `path`."""
    place = plan_at(path, held_out=held_out)
    done = trio.run(partial(_simulate, place, steps, workers or len(os.sched_getaffinity(0))))
    return json.dumps(_document(done), ensure_ascii=False) if as_json else "\n".join(_lines(done))


async def simulated(place: LocatedPlan, steps: int, workers: int) -> dict[str, object]:
    """The first steps of a plan, as a JSON document."""
    return _document(await _simulate(place, steps, workers))


async def _simulate(place: LocatedPlan, steps: int, workers: int) -> _Simulated:
    begun_s = time.monotonic()
    find_modules_in(place.directory)
    listings = await list_sources(place)
    found = await trio.to_thread.run_sync(prepare_plan, place, listings)
    rules = found.compiled.rules
    memory = memory_of(None, rules, found.sources, workers)

    def skipped(source: str, file: int, offset: int, reason: str) -> None:
        simulation.totals.note_bad(BadRecord(source, listings[source].files[file].name, offset, reason))

    async with local_engine(workers, preload=partial(preload, place.directory)) as engine:
        simulation = Simulation(
            rules, found.sources, engine, held_bytes_max=memory.held_bytes, skipped=skipped
        )
        with showing_plan("simulate", steps) as show:

            def planned() -> None:
                held = {name: loading.held.tokens for name, loading in simulation.loadings.items()}
                show(simulation.totals, held)

            reason = await simulation.run(steps, planned)
    return _Simulated(found.digest, simulation.totals, reason, time.monotonic() - begun_s)


def _document(done: _Simulated) -> dict[str, object]:
    return {
        "schema": JSON_SCHEMA,
        "plan": done.plan,
        "reason": done.reason,
        "seconds": round(done.seconds, 3),
        "steps": done.totals.steps,
        "tokens": done.totals.tokens,
        **done.totals.measures(),
        "sources": done.totals.sources(),
        "bad_records": [
            {"source": one.source, "file": one.file, "offset": one.offset, "reason": one.reason}
            for one in done.totals.bad[:BAD_SHOWN]
        ],
    }


def _lines(done: _Simulated) -> Iterator[str]:
    totals, measures = done.totals, done.totals.measures()
    yield f"steps      {totals.steps} in {done.seconds:.1f} s; {done.reason}"
    yield f"tokens     {totals.tokens}, fill {measures['fill']:.4f}, {measures['padding_tokens']} of padding"
    yield (
        f"balance    slowest ÷ mean rank {measures['slowest_to_mean']:.4f}, at each micro-batch "
        f"{measures['slowest_to_mean_micro']:.4f}"
    )
    yield f"documents  {measures['cut_documents']} cut, {measures['lost_tokens']} tokens lost by truncate or drop"
    yield f"planning   {measures['planning_ms']:.1f} ms a step"
    yield ""
    header = ["SOURCE", "SHARE", "WANTED", "TOKENS", "RECORDS", "SKIPPED", "EPOCH"]
    rows = [
        [
            printable(name),
            f"{one['share']:.3%}",
            f"{one['wanted']:.3%}",
            *(str(one[key]) for key in ("tokens", "records", "skipped", "epoch")),
        ]
        for name, one in totals.sources().items()
    ]
    yield from table(header, rows)
    for bad in totals.bad[:10]:
        yield f"skipped: source {printable(bad.source)}, {printable(bad.file)} at {bad.offset}: {printable(bad.reason)}"
