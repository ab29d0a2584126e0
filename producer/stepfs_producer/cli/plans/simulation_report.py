"""What `stepfs-produce simulate` prints: a page, or a JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import trio

from stepfs.cli.columns import printable, table
from stepfs_producer.cli.plans.run_report import say, showing_plan
from stepfs_producer.run.check.simulation import simulate_plan
from stepfs_producer.run.prepare import plan_at
from stepfs_producer.run.results import SimulationResult


def simulation_report(path: Path, *, steps: int, workers: int | None, held_out: bool, as_json: bool) -> str:
    place = plan_at(path, held_out=held_out)
    done = trio.run(partial(simulate_plan, place, steps, workers, say=say, progress=showing_plan))
    return json.dumps(done.document(), ensure_ascii=False) if as_json else "\n".join(_lines(done))


def _lines(done: SimulationResult) -> Iterator[str]:
    totals, measures = done.totals, done.totals.measures()
    yield f"steps      {totals.steps} in {done.seconds:.1f} s; {done.reason}"
    yield f"tokens     {totals.tokens}, fill {measures['fill']:.4f}, {measures['padding_tokens']} of padding"
    yield (
        f"balance    slowest ÷ mean rank {measures['slowest_to_mean']:.4f}, at each micro-batch "
        f"{measures['slowest_to_mean_micro']:.4f}"
    )
    for name, load in measures.get("loads", {}).items():
        yield (
            f"  {name:8} slowest ÷ mean rank {load['slowest_to_mean']:.4f}, at each micro-batch "
            f"{load['slowest_to_mean_micro']:.4f}"
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
    yield from (printable(f"skipped: {line}") for line in totals.bad_lines())
