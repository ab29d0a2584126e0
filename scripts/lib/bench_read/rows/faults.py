"""A store that hangs, loses answers, or is ten times slower: readers get the right bytes, later.

Two readers go through the same lake in a loop, one with plain reads, one through a mapping, so that an error would be
an EIO or a SIGBUS. Every pass is a new mount without a disk cache; the trouble comes while the second file is read.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.bed import Bed, Mount
from bench.machine import program, until
from bench.report import Row

LARGE = 8, 96  # files of 1/8 of a large one
SMALL = 1024, 640  # enough requests for one in a hundred to be lost
CONNECTIONS = 12  # GETs ahead of readers at a time: slowed together by ten, each by ten times as many
WAYS = ("plain", "mapped")


class Proxy:
    """`bench_read.programs.fault_proxy` in front of the server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.endpoint_url = process.stdout.readline().strip()
        self._process = process

    def tell(self, what: str, **order: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **order}) + "\n")
        self._process.stdin.flush()


@contextmanager
def proxied(bed: Bed) -> Iterator[Proxy]:
    port = bed.server.endpoint_url.rpartition(":")[2]
    command = program("bench_read.programs.fault_proxy", port)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Proxy(process)
        finally:
            process.kill()


def faults(bed: Bed) -> None:
    """One row per trouble; the longest that a file took says how long readers waited."""
    large, small = Files(bed, LARGE), Files(bed, SMALL)
    with proxied(bed) as proxy:
        well = _pass(bed, proxy, large, None)
        rate = large.size * len(large.digests) / sum(well["seconds"]) * len(WAYS)
        slow = {"delay_s": 0.02, "bytes_per_s": rate / 10 / CONNECTIONS}
        for name, files, trouble in (
            (f"hung for {bed.plan.hang_s:g} s", large, ("hang", {})),
            ("1 % of the answers lost", small, ("lose", {"share": 0.01})),
            (f"10 × slower for {bed.plan.trouble_s:g} s", large, ("slow", slow)),
        ):
            found = _pass(bed, proxy, files, trouble)
            ours = f"{found['files']} files, {found['wrong']} wrong, {found['errors']} errors"
            text = f"longest wait {found['longest_s']:.1f} s of {found['all_s']:.0f}; when well {well['longest_s']:.2f} s"
            bed.report.add(Row(f"store {name}", ours, text, None, "0 wrong, 0 errors", held=found["held"]))
            bed.report.figures[f"store {name}"] = found


class Files:
    """A lake of one slice per step, and the digests of its files."""

    def __init__(self, bed: Bed, share: tuple[int, int]) -> None:
        divisor, steps = share
        self.size = bed.plan.file_bytes // divisor
        bodies = [body_of(step, self.size) for step in range(min(steps, bed.plan.small_steps * 10))]
        self.url = bed.lake("faults", 1, iter([[body] for body in bodies]))
        self.digests = [hashlib.sha256(body).hexdigest() for body in bodies]


def body_of(step: int, size: int) -> bytes:
    seed = hashlib.sha256(b"%d" % step).digest()
    return seed * (size // len(seed))


def _pass(
    bed: Bed, proxy: Proxy, files: Files, trouble: tuple[str, dict[str, float]] | None
) -> dict[str, Any]:
    environment = {"AWS_ENDPOINT_URL_S3": proxy.endpoint_url}
    with bed.mounted(files.url, environment=environment) as mount:
        listed = bed.directory / "digests.json"
        listed.write_text(
            json.dumps({str(mount.path(n, 0)): digest for n, digest in enumerate(files.digests)})
        )
        command = program("bench_read.programs.check_digests", str(listed))
        began = time.monotonic()
        readers = [subprocess.Popen([*command, way], stdout=subprocess.PIPE, text=True) for way in WAYS]
        try:
            _trouble(bed, proxy, mount, trouble)
            answers = [_answer(reader) for reader in readers]
        finally:
            for reader in readers:
                reader.kill()
                reader.wait()
            proxy.tell("well")
    took = time.monotonic() - began
    waits = sorted(value for answer in answers for value in answer["seconds"])
    wrong, errors = (sum(answer[what] for answer in answers) for what in ("wrong", "errors"))
    complete = all(len(answer["seconds"]) == len(files.digests) for answer in answers)
    return {
        "files": len(waits),
        "wrong": wrong,
        "errors": errors,
        "longest_s": waits[-1],
        "all_s": took,
        "held": complete and not wrong and not errors,
        "seconds": waits,
    }


def _trouble(bed: Bed, proxy: Proxy, mount: Mount, trouble: tuple[str, dict[str, float]] | None) -> None:
    if trouble is None:
        return
    until(lambda: mount.data()["requests"] > 0, 30)
    kind, order = trouble
    if kind == "hang":
        proxy.tell("hold")
        time.sleep(bed.plan.hang_s)
        proxy.tell("release")
    else:
        proxy.tell(kind, **order)
        if kind == "slow":
            time.sleep(bed.plan.trouble_s)
            proxy.tell("well")


def _answer(reader: subprocess.Popen[str]) -> dict[str, Any]:
    """What a reader found; one that was killed by a signal (SIGBUS) is an error."""
    text, _ = reader.communicate(timeout=600)
    lines = [json.loads(line) for line in text.splitlines()]
    return {
        "seconds": [line["seconds"] for line in lines] or [float("nan")],
        "wrong": sum(line["wrong"] for line in lines),
        "errors": sum(line["error"] for line in lines) + (reader.returncode != 0),
    }
