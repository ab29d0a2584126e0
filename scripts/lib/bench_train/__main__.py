"""A training loop that sleeps for its compute: the share of time it waits for data."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from bench.bed import Bed, Plan
from bench.machine import touch_memory
from bench.report import ROOT, Report
from bench_train.accelerator import Pace, accelerator, disturbed


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_train", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it works; measures nothing")
    parser.add_argument("--disturbed", action="store_true", help="beside a hand-over, and a kill, a minute: 15 minutes")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench", help="default: .bench/")
    options = parser.parse_args()
    report = Report("bench_train", "Share of step time spent waiting for data")
    plan, pace = (Plan.quick(), Pace.quick()) if options.quick else (Plan(), Pace())
    with ExitStack() as stack:
        bed = Bed(report, plan, stack)
        touch_memory(plan.touch_bytes)
        if options.disturbed:
            disturbed(bed, Pace(steps=640, bandwidths=(10e6,)))
        else:
            accelerator(bed, pace)
    report.finish(options.out)


if __name__ == "__main__":
    main()
