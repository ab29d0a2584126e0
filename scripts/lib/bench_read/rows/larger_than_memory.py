"""One slice larger than the memory budget, against the same slice within it and plain ranged GETs; CPU by thread.

The store is on loopback, so this row shows what the daemon can carry. With 100 ms a GET the same is held in virtual time,
by `test_a_slice_larger_than_the_budget_is_read_as_fast_as_one_that_fits`.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import servers

from bench.bed import Bed, data_objects
from bench.machine import MIB, cpu_s, touch_memory
from bench.probe import plain

_FILES = 8  # of the plan's size make up the slice


def large(bed: Bed) -> None:
    """One pass per budget and round, each mount fresh."""
    size = _FILES * bed.plan.file_bytes
    url = bed.lake("beyond", 1, iter([[os.urandom(bed.plan.file_bytes) * _FILES]]))
    (key,) = data_objects(url)
    seconds: dict[str, list[float]] = {}
    for _ in range(bed.plan.rounds):
        for name, budget in (("within", 2 * size), ("beyond", max(64 * MIB, size // 2))):
            touch_memory(min(size, 1 << 30))
            with bed.mounted(url, "--memory", f"{max(64, budget // MIB)}M", "--no-prime") as mount:
                began, before = time.perf_counter(), threads_cpu_s(mount.pid)
                assert plain()(str(mount.path(0, 0))) == size
                seconds.setdefault(name, []).append(time.perf_counter() - began)
                used = {
                    role: round((now - before.get(role, 0.0)) / (size / 1e9), 3)
                    for role, now in threads_cpu_s(mount.pid).items()
                }
                bed.report.figures[f"CPU-s per GB by thread, {name}"] = used
        order = {"bucket": servers.BUCKET, "keys": [key], "bytes": size, "threads": 8}
        seconds.setdefault("boto3", []).extend(bed.probe(kind="boto3", **order)["seconds"])
    speed = bed.speeds("large", seconds, size)
    bed.ratio(0.9, "a slice beyond the budget", speed["beyond"], "within it", speed["within"])
    bed.ratio(0.5, "a slice beyond the budget", speed["beyond"], "boto3 × 8", speed["boto3"])


def threads_cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of a daemon: its loop, and all its worker threads together."""
    found = {"loop": 0.0, "workers": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            found["loop" if int(task.name) == pid else "workers"] += cpu_s(task)
    return found
