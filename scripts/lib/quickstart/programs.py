"""Programs of the quickstart: started in sessions of their own, and gone when it ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from bench.machine import BIN

T = TypeVar("T")


def start(running: ExitStack, command: list[str]) -> subprocess.Popen[str]:
    """A program of this environment in a session of its own: Ctrl-C is ours to handle, its children are its own."""
    process = subprocess.Popen(
        [str(BIN / command[0]), *command[1:]], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    running.callback(stop, process)
    return process


def stop(process: subprocess.Popen[str]) -> None:
    """With everything it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], check=False, text=True, stdout=subprocess.PIPE, timeout=120,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"quickstart: {' '.join(command[:2])} ended with exit code {done.returncode}")
    return done


def in_time(what: str, wait: Callable[..., T], seconds: float) -> T:
    """What `wait(timeout=…)` gives, or an end that says what did not come."""
    try:
        return wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"quickstart: {what} did not come in time") from None


def refuse_failure(who: str, process: subprocess.Popen[str]) -> None:
    """End the quickstart if that process has ended with an error."""
    if process.poll():
        raise SystemExit(f"quickstart: {who} ended with exit code {process.returncode}; its message is above")


def processes_naming(directory: Path) -> Iterator[str]:
    """Command lines of other processes that mention the directory."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # gone meanwhile
            if any(str(directory) in word for word in words):
                yield " ".join(words)
