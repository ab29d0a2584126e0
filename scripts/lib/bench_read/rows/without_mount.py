"""`stepfs.reader` beside the mount: the same slices from the same server, cold and fetched ahead, in turns.

The mount's side is that of the other rows: a fresh process that reads 1 MiB at a time. The reader gives the whole slice in
one piece.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from bench.bed import Bed
from bench.machine import MIB, program, touch_memory
from bench_read.rows.large_files import RAW, Large

_TOUCHED_FILES = 16
_COLD_MIN = 0.9
_PRIMED_MIN = 0.8


def without_mount(bed: Bed, large: Large) -> None:
    """Two rows of ratios."""
    url, size = large.url, bed.plan.file_bytes
    chance = random.Random(13)
    cold: dict[str, list[float]] = {}
    primed: dict[str, list[float]] = {}
    memory = max(64 * MIB, 6 * size)
    options = ["--prefetch", "0", "--memory", f"{memory // MIB}M"]
    with bed.mounted(url, *options) as mount, _reader(url, memory, 0) as ask:
        for other in (RAW + 1, RAW + 2):
            bed.read_once(mount.path(0, other))
        for number in range(bed.plan.rounds):
            touch_memory(_TOUCHED_FILES * size)
            bed.read_once(mount.path(number, RAW + 3))  # the server's own pages of this object are warm
            sides: dict[str, Callable[[], float]] = {
                "mount": partial(bed.read_once, mount.path(number, RAW)),
                "reader": partial(ask, f"cold {number}"),
            }
            for side in chance.sample(list(sides), 2):
                cold.setdefault(side, []).append(sides[side]())
    for number in range(bed.plan.rounds):
        with large.primed_mount(number, RAW) as mount:
            primed.setdefault("mount", []).append(bed.read_once(mount.path(number, RAW)))
        touch_memory(_TOUCHED_FILES * size)
        with _reader(url, memory, 2) as ask:
            primed.setdefault("reader", []).append(ask(f"primed {max(0, min(number, bed.plan.rounds - 2))}"))
    for what, bound, seconds in (("cold", _COLD_MIN, cold), ("fetched ahead", _PRIMED_MIN, primed)):
        speed = bed.speeds(f"reader, {what}", seconds, size)
        bed.ratio(bound, f"without a mount, {what}", speed["reader"], "mount", speed["mount"])


@contextmanager
def _reader(url: str, memory: int, prefetch: int) -> Iterator[Callable[[str], float]]:
    order = json.dumps({"url": url, "rank": RAW, "memory": memory, "prefetch": prefetch, "warm": [RAW + 1, RAW + 2]})
    with subprocess.Popen(
        program("bench_read.programs.lake_reader", order),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        assert stdout.readline() == "ready\n"

        def ask(line: str) -> float:
            stdin.write(f"{line}\n")
            stdin.flush()
            return float(stdout.readline())

        yield ask
        stdin.close()
