"""The parts of scripts/bench_plan in order, into one report."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.report import ROOT, Report
from bench_plan import chats, columns, engines, faults, history, memory, throughput, times, work
from stepfs.cli.failure import reported

PARTS = {
    "time": times.run,
    "memory": memory.run,
    "throughput": throughput.run,
    "faults": faults.run,
    "lineage": history.lineage,
    "replay": history.replay,
    "cost": work.cost,
    "late": work.late,
    "tickets": engines.tickets,
    "ray": engines.ray,
    "columns": columns.run,
    "chats": chats.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    report = Report("bench_plan", "stepfs: planned steps")
    for part in options.only:
        report.say(f"[bold]{part}[/bold]")
        with tempfile.TemporaryDirectory(prefix="stepfs-bench-plan-") as name:
            PARTS[part](report, Path(name), quick=options.quick)
    report.finish(options.out)
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


if __name__ == "__main__":
    with reported("bench_plan"):
        sys.exit(main())
