"""One side at a time: without a kernel, without a store, without both; and fio's jobs where fio is installed.

What remains when a side is replaced by memory says which side a figure is made by.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path

import trio

from bench.bed import Bed
from bench.machine import run
from bench.report import Row, median
from bench_read.rows.large_files import RAW, Large
from stepfs.data.slices import Slices
from stepfs.errors import StepfsError
from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store

READ_BYTES = 1 << 20
JOBS = {
    "sequential, 256 KiB blocks": ["--rw=read", "--bs=256k", "--numjobs=1"],
    "sequential, 256 KiB blocks, 4 jobs": ["--rw=read", "--bs=256k", "--numjobs=4"],
    "random, 256 KiB blocks": ["--rw=randread", "--bs=256k", "--numjobs=1"],
    "random, 4 KiB blocks": ["--rw=randread", "--bs=4k", "--numjobs=1"],
}


def no_kernel(bed: Bed, large: Large) -> None:
    """`SliceHandle.read` in this process, from the server: what the data rooms do without FUSE."""
    times = trio.run(_read_slices, large.url, bed.plan.rounds, 2 * bed.plan.file_bytes)
    speed = bed.speeds("no kernel", {"cold": times[0], "memory": times[1]}, bed.plan.file_bytes)
    bed.report.add(
        Row("stub, no kernel: cold from the server", f"{speed['cold']:,.0f} MB/s"),
        Row("stub, no kernel: from the daemon's memory", f"{speed['memory']:,.0f} MB/s"),
    )


async def _read_slices(url: str, rounds: int, memory_bytes: int) -> tuple[list[float], list[float]]:
    """(cold, from memory). Memory for two files, so that most are read into buffers that were touched before."""
    store = open_store(url)
    cold: list[float] = []
    again: list[float] = []
    target = memoryview(bytearray(b"\1" * READ_BYTES))
    try:
        reader = await LogReader.open(store, await open_lake(store))
        slices = Slices(store, memory_bytes=max(64 << 20, memory_bytes))
        async with trio.open_nursery() as nursery:
            await nursery.start(slices.run)
            for number in range(rounds):
                handle = slices.reads.open(await reader.entry(Step(number)), SliceIndex(RAW))
                for seconds in (cold, again):
                    began = time.perf_counter()
                    for offset in range(0, handle.length, READ_BYTES):
                        view = await handle.read(offset, READ_BYTES)
                        target[: len(view)] = view  # the kernel copies, too
                    seconds.append(time.perf_counter() - began)
                handle.close()
            nursery.cancel_scope.cancel()
    finally:
        await store.aclose()
    return cold, again


def no_store(bed: Bed) -> None:
    """A lake in memory (/dev/shm) behind the real mount, cold: the daemon and the kernel alone."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shutil.disk_usage(shm).free < 4 * bed.plan.file_bytes * bed.plan.rounds:
        bed.report.say("no room in /dev/shm: the stub without a store is left out")
        return
    lake = shm / bed.directory.name
    try:
        batches = ([bytes([step]) * bed.plan.file_bytes] for step in range(bed.plan.rounds))
        url = bed.lake("memory", 1, batches, url=lake.as_uri())
        with bed.mounted(url, "--prefetch", "0") as mount:
            times = [
                bed.probe(kind="raw", paths={"stepfs": str(mount.path(step, 0))}, passes=1)["seconds"][
                    "stepfs"
                ][0]
                for step in range(bed.plan.rounds)
            ]
    finally:
        shutil.rmtree(lake, ignore_errors=True)
    speed = bed.plan.file_bytes / 1e6 / median(times)
    bed.report.figures["no store"] = times
    bed.report.add(Row("stub, no store: cold from /dev/shm", f"{speed:,.0f} MB/s"))


def fio(bed: Bed, large: Large) -> None:
    """The jobs that mountpoint-s3 and gcsfuse publish, on a primed file and on the same bytes in ext4."""
    if shutil.which("fio") is None:
        bed.report.say("fio is not installed (Debian: apt-get install fio): its jobs are left out")
        return
    assert large.url
    with bed.mounted(large.url, "--ranks", f"{RAW}", "--prefetch", "1") as mount:
        mount.primed(1)
        local = large.local / "raw.bin"
        local.read_bytes()
        for name, job in JOBS.items():
            speeds: dict[str, list[float]] = {"stepfs": [], "ext4": []}
            for _ in range(3):
                for side, path in (("stepfs", mount.path(0, RAW)), ("ext4", local)):
                    with suppress(StepfsError):
                        speeds[side].append(_fio(path, job))
            ours, theirs = median(speeds["stepfs"]), median(speeds["ext4"])
            bed.report.figures[f"fio {name}"] = speeds
            text = f"ext4 {theirs:,.0f} MB/s"
            bed.report.add(Row(f"fio {name}, primed", f"{ours:,.0f} MB/s", text, ours / theirs))


def _fio(path: Path, job: list[str]) -> float:
    """MB/s. `invalidate=0`: fio would empty the page cache before it begins."""
    command = ["fio", "--name=job", f"--filename={path}", "--readonly", "--direct=0", "--invalidate=0"]
    command += ["--ioengine=psync", "--loops=4", "--group_reporting", "--output-format=json", *job]
    found = json.loads(run(command).stdout)
    return float(found["jobs"][0]["read"]["bw_bytes"] / 1e6)
