"""A training loop on a mount beside one that preprocesses in its own workers: the share of time it waits for data."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench.bed import Bed, Plan
from bench.machine import touch_memory
from bench.report import ROOT, Report
from bench_train.peers import job
from bench_train.peers.catalogue import CATALOGUE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCELERATOR = "accelerator"
KINDS = (ACCELERATOR, "images", "text")
SHARES = (0.5, 0.8, 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_train", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it works; measures nothing")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="KIND",
        help=f"{', '.join(KINDS)}; with --peers: {', '.join(CATALOGUE)}",
    )
    parser.add_argument(
        "--share", type=float, nargs="+", default=list(SHARES), help="of the store's bandwidth"
    )
    parser.add_argument("--peers", action="store_true", help="one job beside what people use today, instead")
    parser.add_argument("--kinds", nargs="+", choices=job.KINDS, default=job.KINDS, help="with --peers")
    parser.add_argument("--rounds", type=int, default=1, help="with --peers: undisturbed epochs of each")
    parser.add_argument("--json", type=Path, help="with --peers: a copy of the figures")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench", help="default: .bench/")
    options = parser.parse_args()
    known = tuple(CATALOGUE) if options.peers else KINDS
    only = tuple(name for word in options.only for name in word.split(",") if name) or known
    if unknown := set(only) - set(known):
        parser.error(f"--only {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if options.peers:
        from bench_train.peers import command  # noqa: PLC0415 - what the other rows do not need

        kinds, quick, rounds = tuple(options.kinds), options.quick, options.rounds
        command.main(command.Options(only, kinds, quick, rounds, options.out, options.json))
        return
    stalls(options, only)


def stalls(options: argparse.Namespace, only: tuple[str, ...]) -> None:
    from bench_train.accelerator import Pace, accelerator  # noqa: PLC0415 - torch, which the peers' rows keep out
    from bench_train.preprocessing import WORKS  # noqa: PLC0415
    from bench_train.stall import Size, stall  # noqa: PLC0415

    report = Report("bench_train", "Share of step time spent waiting for data")
    plan, size = (Plan.quick(), Size.quick()) if options.quick else (Plan(), Size())
    with ExitStack() as stack:
        bed = Bed(report, plan, stack)
        touch_memory(plan.touch_bytes)
        if ACCELERATOR in only:
            accelerator(bed, Pace.quick() if options.quick else Pace())
        kinds = tuple(kind for kind in only if kind in WORKS)
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
