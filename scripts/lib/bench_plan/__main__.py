"""The parts of scripts/bench_plan in order, into one report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import ROOT, Report
from bench_plan import balance, columns, elastic, faults, history, loads, memory, mix, throughput, times, work
from stepfs.cli.failure import reported

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {
    "balance": balance.run,
    "time": times.run,
    "mix": mix.run,
    "memory": memory.run,
    "throughput": throughput.run,
    "faults": faults.run,
    "elastic": elastic.run,
    "lineage": history.lineage,
    "replay": history.replay,
    "cost": work.cost,
    "late": work.late,
    "columns": columns.run,
    "loads": loads.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    report = Report("bench_plan", "stepfs: planned steps")
    for part in options.only:
        report.say(f"[bold]{part}[/bold]")
        PARTS[part](report, quick=options.quick)
    report.finish(options.out, partial(draw, report.figures))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_plan", description=__doc__)
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer ranks, sources and steps")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench")
    options = parser.parse_args(arguments)
    options.only = [part for part in options.only.split(",") if part]
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    return options


def draw(figures: dict[str, Any], figure: Figure) -> None:
    """Slowest ÷ mean, balanced and as rows come; share errors beside."""
    even, off = figure.subplots(1, 2)
    for over, length, kind, ranks, ours, plain in figures.get("balance", []):
        colour = "tab:blue" if over == "ranks" else "tab:orange"
        even.scatter([f"{length // 1024}k"], [plain], marker="x", c=colour, s=10)
        even.scatter([f"{length // 1024}k"], [ours], c=colour, s=10, label=f"{over} {kind} {ranks}")
    even.axhline(1.02, color="grey", linewidth=0.5)
    even.set(
        ylabel="slowest ÷ mean rank", title="7B cost (x: as rows come; orange: ranks meet at micro-batches)"
    )
    for name, errors in figures.get("mix", {}).items():
        off.bar(f"{name}\nours", errors["ours"], color="tab:blue")
        off.bar(f"{name}\nrandom", errors["random"], color="tab:red")
    off.axhline(mix.BOUND_PERCENT, color="grey", linewidth=0.5)
    off.set(
        ylabel="share error, percentage points", yscale="log" if figures.get("mix") else "linear", title="mix"
    )


if __name__ == "__main__":
    with reported("bench_plan"):
        sys.exit(main())
