"""A training loop on a mount beside one that preprocesses in its own workers: the share of time it waits for data."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench.bed import Bed, Plan
from bench.machine import touch_memory
from bench.report import ROOT, Report
from bench_train.accelerator import Pace, accelerator
from bench_train.preprocessing import WORKS
from bench_train.stall import SHARES, Size, stall

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCELERATOR = "accelerator"
KINDS = [ACCELERATOR, *WORKS]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_train", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it works; measures nothing")
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS)
    )
    parser.add_argument(
        "--share", type=float, nargs="+", default=list(SHARES), help="of the store's bandwidth"
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".bench", help="default: .bench/")
    options = parser.parse_args()
    report = Report("bench_train", "Share of step time spent waiting for data")
    plan, size = (Plan.quick(), Size.quick()) if options.quick else (Plan(), Size())
    with ExitStack() as stack:
        bed = Bed(report, plan, stack)
        touch_memory(plan.touch_bytes)
        if ACCELERATOR in options.only:
            accelerator(bed, Pace.quick() if options.quick else Pace())
        kinds = tuple(kind for kind in options.only if kind in WORKS)
        stall(bed, kinds, tuple(options.share), size, colocated=True)
    report.finish(options.out, lambda figure: draw(figure, report))


def draw(figure: Figure, report: Report) -> None:
    """A group of bars per kind: stall by share, both sides."""
    found = {name: each for name, each in report.figures.items() if name.startswith("stall, ")}
    if not found:
        return
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for one, (name, each) in zip(axes, found.items(), strict=True):
        for offset, side in ((-0.2, "mount"), (0.2, "colocated")):
            runs = [run for run in each["runs"] if run["side"] == side]
            heights = [100 * sum(r["stall"] for r in run["runs"]) / len(run["runs"]) for run in runs]
            one.bar([i + offset for i in range(len(runs))], heights, 0.4, label=side)
            one.set_xticks(range(len(runs)), [f"{run['share']:.0%}" for run in runs])
        one.set_title(name)
        one.set_xlabel("share of the store's bandwidth")
        one.set_ylabel("% of step time waiting for data")
        one.legend()


if __name__ == "__main__":
    main()
