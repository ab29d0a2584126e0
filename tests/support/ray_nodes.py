"""A Ray cluster on this machine, and its processes; ray itself is in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nightly

RAY_PYTHON = Path(sys.prefix) / "ray/bin/python"  # `scripts/setup --nightly` makes it
_CLUSTER = Path(__file__).with_name("ray_cluster.py")
END_S = 60.0  # that processes have to end, on a machine that has other work


@contextmanager
def cluster(*nodes: str) -> Iterator[tuple[str, Callable[[int], None]]]:
    """Its address, and what loses a node."""
    nightly.needs("Ray", there=RAY_PYTHON.exists())
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as directory:
        with subprocess.Popen(
            [RAY_PYTHON, _CLUSTER, directory, *nodes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address

            def lose(number: int) -> None:
                assert process.stdin is not None
                assert process.stdout is not None
                print(number, file=process.stdin, flush=True)
                assert process.stdout.readline() == "lost\n"

            try:
                yield address, lose
            finally:
                process.stdin.close()  # else its nodes may take a minute to see that nobody wants them
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        until(lambda: not processes(below=directory), 200)


def processes(*, named: str = "", below: str = "") -> list[int]:
    """Those that are called so, of a Ray in this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if name.startswith(named) and below.encode() in (entry / "environ").read_bytes() + name.encode():
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


def until(holds: Callable[[], object], seconds: float = END_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
