"""A mount under a memory limit for as long as asked: right bytes, no error, memory flat, never killed.

The daemon runs in a cgroup of its own (v1 or v2, whichever can be written here) with less memory than its readers
would fill; pages it primes are charged to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean

from bench.bed import Bed, body_of
from bench.machine import BIN, MIB, is_mounted, let_go, program, rss, until
from bench.report import Row, at_most

LIMIT_BYTES = 512 * MIB
STEPS, RANKS = 96, 4
_SAMPLE_S = 1.0
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextmanager
def _cgroup(limit: int) -> Iterator[Path | None]:
    """A memory cgroup of our own, or None where none can be made."""
    v2 = (_V2 / "cgroup.controllers").exists()
    directory = (_V2 if v2 else _V1) / f"stepfs-bench-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError:
        yield None
        return
    try:
        (directory / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(limit))
        yield directory
    except OSError:
        yield None
    finally:
        until(lambda: not (directory / "cgroup.procs").read_text(), 20)
        with suppress(OSError):
            directory.rmdir()


def soak(bed: Bed, minutes: float) -> None:
    """Two readers check every byte, over and over."""
    size = max(bed.plan.file_bytes // 16, MIB // 4)
    bodies = [[body_of(step * RANKS + rank, size) for rank in range(RANKS)] for step in range(STEPS)]
    url = bed.lake("soak", RANKS, iter(bodies))
    with _cgroup(LIMIT_BYTES) as group:
        if group is None:
            bed.report.say("no cgroup can be made here: the soak runs without a memory limit")
        directory = bed.fresh("soak")
        command = [str(BIN / "stepfs"), "mount", url, str(directory), "--foreground"]

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        log = bed.directory / "soak.log"
        with log.open("ab") as output:
            daemon = subprocess.Popen(
                command,
                preexec_fn=enter,  # noqa: PLW1509 - two system calls
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        try:
            until(lambda: is_mounted(directory) and (directory / ".stepfs/status.json").exists(), 60)
            _watch(bed, directory, daemon, group, bodies, minutes * 60)
        finally:
            let_go(directory)
            daemon.terminate()
            daemon.wait(30)


def _watch(
    bed: Bed,
    directory: Path,
    daemon: subprocess.Popen[bytes],
    group: Path | None,
    bodies: list[list[bytes]],
    seconds: float,
) -> None:
    listed = bed.directory / "soak.json"
    digests = {
        str(directory / f"step-{step:09d}" / f"rank-{rank:05d}.bin"): hashlib.sha256(body).hexdigest()
        for step, batch in enumerate(bodies)
        for rank, body in enumerate(batch)
    }
    listed.write_text(json.dumps(digests))
    results = [bed.directory / f"soak-{way}.jsonl" for way in ("plain", "mapped")]
    readers = []
    for result in results:
        command = program("bench_read.programs.check_digests", str(listed), result.stem[5:], str(seconds))
        with result.open("wb") as output:
            readers.append(subprocess.Popen(command, stdout=output))
    samples = []
    try:
        while any(reader.poll() is None for reader in readers) and daemon.poll() is None:
            samples.append(rss(daemon.pid))
            time.sleep(_SAMPLE_S)
        survived = daemon.poll() is None
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    lines = [json.loads(line) for result in results for line in result.read_text().splitlines()]
    wrong = sum(line["wrong"] for line in lines)
    errors = sum(line["error"] for line in lines) + sum(reader.returncode != 0 for reader in readers)
    quarter = max(1, len(samples) // 4)
    second, last = fmean(samples[quarter : 2 * quarter] or samples), fmean(samples[-quarter:])
    bed.report.figures["soak"] = {"rss": samples, "files": len(lines), "wrong": wrong, "errors": errors}
    limit = "no limit" if group is None else f"limit {LIMIT_BYTES // MIB} MiB"
    held = survived and not wrong and not errors
    ours = f"{len(lines):,} files, {wrong} wrong, {errors} errors{'' if survived else ', daemon DIED'}"
    bed.report.add(
        Row(f"soak of {seconds / 60:g} minutes, {limit}", ours, "", None, "0 wrong, 0 errors", held=held),
        at_most(
            1.1,
            "RSS, last quarter / second quarter",
            f"{last / MIB:.0f} MiB",
            f"{second / MIB:.0f} MiB; most {max(samples) / MIB:.0f}",
            last / second,
        ),
    )
