"""Progress and result of a run or a simulation: a bar on a terminal, then the totals as lines or a JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio
import typer

from stepfs import interruption
from stepfs.cli.columns import printable, table
from stepfs.cli.failure import announce
from stepfs_producer.run.check import simulate_plan
from stepfs_producer.run.conductor import EndReason
from stepfs_producer.run.options import RunOptions
from stepfs_producer.run.prepare import LocatedPlan, plan_at
from stepfs_producer.run.results import PlanTotals, RunResult, Show, SimulationResult
from stepfs_producer.run.session import Stopping, run_plan


def say(line: str) -> None:
    announce(printable(line))


def run_and_report(place: LocatedPlan, options: RunOptions, *, as_json: bool = False) -> int:
    """Run to the end of the plan, the limit or a signal; the exit code."""
    with Stopping(say) as stopping:
        try:
            result = trio.run(partial(run_plan, place, options, stopping, say=say, progress=showing_plan))
        except KeyboardInterrupt:
            return stopping.exit_code
    for line in result.totals.bad_lines():
        say(f"skipped: {line}")
    typer.echo(json.dumps(result.document()) if as_json else _line(result))
    return stopping.exit_code if result.ending is EndReason.STOPPED else 0


def _line(result: RunResult) -> str:
    totals = result.totals
    ended = {
        EndReason.COMPLETE: result.reason,
        EndReason.LIMIT: "the limit is reached",
        EndReason.STOPPED: "stopped; run the same command again to continue",
    }[result.ending]
    sealed = "; the lake is sealed" if result.sealed else ""
    if not totals.steps:
        sealed = "; sealed, nothing to do" if result.sealed else ""
        return f"{result.producer_id}: no further step; {totals.state.step} steps in total; {ended}{sealed}"
    measures = totals.measures()
    shares = ", ".join(
        f"{printable(name)} {one['share']:.2%}" + (f" ({one['skipped']} records skipped)" if one["skipped"] else "")
        for name, one in totals.sources().items()
    )
    bottleneck = "" if result.bottleneck is None else f"bottleneck: {printable(str(result.bottleneck))}; "
    return (
        f"{result.producer_id}: {totals.steps} steps in {result.seconds:.1f} s, all committed; {totals.state.step} steps in "
        f"total; {totals.tokens} tokens ({shares}), fill {measures['fill']:.4f}, slowest ÷ mean rank "
        f"{measures['slowest_to_mean']:.4f}; {bottleneck}{ended}{sealed}"
    )


@contextmanager
def showing_plan(name: str, steps_max: int | None) -> Iterator[Show]:
    """A callable (totals, tokens held ahead by source) that keeps the bar current; nothing without a terminal."""
    if not sys.stderr.isatty():
        yield lambda _totals, _held: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[line]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=steps_max, line="")

        def show(totals: PlanTotals, held: Mapping[str, int]) -> None:
            measures = totals.measures()
            low = sorted(held, key=lambda one: held[one])[:3]
            line = (
                f"{totals.state.step} steps  {_short(totals.tokens)} tokens  fill {measures['fill']:.3f}  "
                f"slowest/mean {measures['slowest_to_mean']:.3f}  plan {measures['planning_ms']:.0f} ms  ahead: "
                + " ".join(f"{one} {_short(held[one])}" for one in low)
            )
            progress.update(task, completed=totals.state.step, line=line)

        yield show


def _short(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def simulation_report(path: Path, *, steps: int, workers: int | None, held_out: bool, as_json: bool) -> str:
    place = plan_at(path, held_out=held_out)
    done = interruption.run(partial(simulate_plan, place, steps, workers, say=say, progress=showing_plan))
    return json.dumps(done.document(), ensure_ascii=False) if as_json else "\n".join(_page(done))


def _page(done: SimulationResult) -> Iterator[str]:
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
