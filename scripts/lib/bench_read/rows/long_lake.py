"""A lake of 10⁶ steps: how long until it is mounted, what a stat and a listing cost, how much memory it takes.

Against a bare pyfuse3 directory of the same size, in turns, each time a new mount.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.bed import Bed
from bench.machine import MIB, detach, make_long_lake, program, rss, run
from bench.report import at_most, median

SLICES = 8
STATS = 1000
ROUNDS = 2


def long_lake(bed: Bed, url: str | None) -> None:
    """`url`: a lake that scripts/make_long_lake made before; None makes one."""
    steps = bed.plan.long_steps
    if url is None:
        url = (bed.directory / "long").as_uri()
        bed.report.say(f"making a lake of {steps} steps")
        make_long_lake(url, steps, SLICES)
    found: dict[str, list[float]] = {}

    def note(side: str, what: str, value: float) -> None:
        found.setdefault(f"{side} {what}", []).append(value)

    for number in range(ROUNDS):
        for side in ("ours", "bare") if number % 2 else ("bare", "ours"):
            if side == "bare":
                with _bare(bed, steps) as (directory, process):
                    _look(directory, steps, side, note)
                    note(side, "RSS", rss(process.pid))
            else:
                with bed.mounted(url, "--no-prime") as mount:
                    steps = int(mount.status()["next_step"])
                    note(side, "ready", mount.ready_s)
                    _look(mount.directory, steps, side, note)
                    note(side, "RSS", mount.rss())
    bed.report.figures[f"lake of {steps} steps"] = found
    got = {name: median(values) for name, values in found.items()}
    report, many = bed.report, f"{steps:,} steps"
    report.add(at_most(3, f"{many}: mount ready", f"{got['ours ready']:.2f} s", "", got["ours ready"], "s"))
    for what, bound, scale, unit in (
        ("uncached stat", 2, 1e6 / STATS, "µs"),
        ("first ls", 1.5, 1, "s"),
        ("second ls", 1.5, 1, "s"),
    ):
        ours, bare = got[f"ours {what}"] * scale, got[f"bare {what}"] * scale
        report.add(at_most(bound, f"{many}: {what}", f"{ours:.2f} {unit}", f"bare {bare:.2f} {unit}", ours / bare))
    used = got["ours RSS"] / MIB
    text = f"bare {got['bare RSS'] / MIB:.0f} MiB"
    report.add(at_most(500, f"{many}: daemon RSS after listing", f"{used:.0f} MiB", text, used, "MiB"))


def _look(directory: Path, steps: int, side: str, note: Callable[[str, str, float], None]) -> None:
    names = [directory / f"step-{step:09d}" for step in random.Random(4).sample(range(steps), STATS)]
    began = time.perf_counter()
    for name in names:
        name.stat()
    note(side, "uncached stat", time.perf_counter() - began)
    for what in ("first ls", "second ls"):
        began = time.perf_counter()
        run(["ls", str(directory)])
        note(side, what, time.perf_counter() - began)


@contextmanager
def _bare(bed: Bed, steps: int) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    directory = bed.fresh("bare")
    command = program("bench_read.programs.bare_mount", str(directory), str(steps))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield directory, process
        finally:
            detach(directory)
            process.terminate()
