"""The parts of scripts/bench_ingest in order, on one server, into one report.

Growth and bandwidth first: they are short. Pace takes the longest, as every side needs its seconds. The cold open of a
million steps is made only when asked for.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import servers  # how tests start SeaweedFS is how it is started
import trio

from bench.machine import forget_variables
from bench.report import ROOT, Report
from bench_ingest import bandwidth, growth, latency, pace
from stepfs.cli.failure import reported

PARTS = ("growth", "bandwidth", "latency", "pace", "cold")
USUAL = "growth,bandwidth,latency,pace"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which `&` in a script would have ignored
    # Through SIGINT, whose handler trio replaces while it runs: raising inside trio itself would break it.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    report = Report("bench_ingest", "stepfs: what writing costs and yields")
    with tempfile.TemporaryDirectory(prefix="stepfs-bench-", dir=options.scratch) as name:
        directory = Path(name)
        forget_variables("AWS_")
        with servers.seaweedfs(directory / "seaweedfs") as server:
            os.environ.update(server.environment())
            url = f"s3://{servers.BUCKET}/bench"
            for part in options.only:
                measure(part, options, report, directory, url)
    report.finish(options.out)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_ingest", description=__doc__)
    parser.add_argument("--only", default="", help=f"comma-separated, of {', '.join(PARTS)} (default: {USUAL})")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything, to see that it works")
    parser.add_argument("--long-lake", action="store_true", help="the cold open of 10⁶ steps, too")
    parser.add_argument("--producers", default="", help="numbers of real processes, default 1,4,16")
    parser.add_argument("--intervals", default="", help="seconds of the sweep, default 0.05,0.1,0.25,0.5,1,2")
    parser.add_argument("--seconds", type=float, default=0.0, help="per side and number of producers, default 20")
    parser.add_argument("--rounds", type=int, default=0, help="in how many turns each side gets them, default 3")
    parser.add_argument("--rate", type=float, default=0.0, help="steps/s offered in all, default: found out")
    parser.add_argument("--long-steps", type=int, default=0, help="length of the long history, default 100000")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench")
    parser.add_argument("--scratch", type=Path, help="where the server keeps its data, default the temporary directory")
    options = parser.parse_args(arguments)
    options.only = [part for part in (options.only or USUAL).split(",") if part]
    if options.long_lake and "cold" not in options.only:
        options.only.append("cold")
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    return options


def measure(part: str, options: argparse.Namespace, report: Report, directory: Path, url: str) -> None:
    quick: bool = options.quick
    report.say(f"[bold]{part}[/bold]")
    match part:
        case "growth":
            steps = options.long_steps or (5_000 if quick else 100_000)
            trio.run(growth.run, report, "SeaweedFS", f"{url}/growth", steps, 10 if quick else 200)
            if not quick:  # a commit is four fsyncs there, which a busy disk makes slow
                base = (directory / "growth").as_uri()
                trio.run(growth.run, report, "file://", base, steps, 200)
        case "bandwidth":
            sizes = (8,) if quick else (8, 64)
            total = 64 if quick else 1024
            trio.run(bandwidth.run, report, f"{url}/bandwidth", sizes, total, 1 if quick else 3)
        case "latency":
            trio.run(latency.run, report, f"{url}/latency", 10.0 if quick else 90.0)
        case "pace":
            trio.run(pace.run, report, f"{url}/pace", plan(options))
        case "cold":
            steps = options.long_steps or (20_000 if quick else growth.COLD_STEPS)
            growth.cold_open(report, directory, steps, 1 if quick else 5)


def plan(options: argparse.Namespace) -> pace.Plan:
    chosen: dict[str, Any] = {"rate": options.rate}
    if options.quick:
        chosen |= {"producers": (1, 4), "seconds": 3.0, "rounds": 1, "warm_s": 0.5, "cool_s": 0.5}
    if options.producers:
        chosen["producers"] = tuple(map(int, options.producers.split(",")))
    if options.intervals:
        chosen["intervals_s"] = tuple(map(float, options.intervals.split(",")))
    if options.seconds:
        chosen["seconds"] = options.seconds
    if options.rounds:
        chosen["rounds"] = options.rounds
    return pace.Plan(**chosen)


if __name__ == "__main__":
    with reported("bench_ingest"):
        sys.exit(main())
