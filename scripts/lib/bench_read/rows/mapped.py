"""Files that are mapped and never touched, more than the budget holds: their cost to the steps that are read."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import servers

from bench.bed import Bed, body_of, data_objects
from bench.probe import plain
from bench.report import at_least

FILE_BYTES = 512 << 10
PACE_S = 0.03


def mapped(bed: Bed) -> None:
    """400 mapped files in 64 MiB, then 100 steps at a trainer's pace; the same without the mapped ones."""
    count, steps = (400, 100) if bed.plan.rounds > 2 else (160, 10)
    url = bed.lake("mapped", 1, ([body_of(step, FILE_BYTES)] for step in range(count + steps)))
    primed, seconds = {}, {}
    for name, mapped_files in (("none", 0), ("mapped", count)):
        with (
            bed.mounted(url, "--group", f"bench-{name}", "--memory-size", "64M") as mount,
            ExitStack() as held,
        ):
            for step in range(mapped_files):
                held.enter_context(_map(mount.path(step, 0)))
            before, files = mount.data(), range(count, count + steps)
            seconds[name] = _train([str(mount.path(step, 0)) for step in files])
            primed[name] = mount.data()["primed_files"] - before["primed_files"]
    order = {"bucket": servers.BUCKET, "keys": data_objects(url)[count:], "bytes": FILE_BYTES, "threads": 1}
    seconds["boto3"] = bed.probe(kind="boto3", **order)["seconds"]
    speed = bed.speeds("mapped", seconds, FILE_BYTES)
    bed.report.figures["primed beside mapped files"] = primed
    what = f"{count} mapped files of 512 KiB in 64 MiB: steps primed, of {steps}"
    text = f"without them {primed['none']}; {speed['mapped']:,.0f} MB/s, plain GETs {speed['boto3']:,.0f}"
    share = primed["mapped"] / max(1, primed["none"])
    bed.report.add(at_least(0.95, what, str(primed["mapped"]), text, share))
    bed.ratio(1.0, "reading beside mapped files", speed["mapped"], "boto3, 1 thread", speed["boto3"])


@contextmanager
def _map(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ):
            yield
    finally:
        os.close(descriptor)


def _train(paths: list[str]) -> list[float]:
    """Seconds of each read; between two of them the trainer sleeps."""
    read, seconds = plain(), []
    for path in paths:
        began = time.perf_counter()
        assert read(path) == FILE_BYTES
        seconds.append(time.perf_counter() - began)
        time.sleep(PACE_S)
    return seconds
