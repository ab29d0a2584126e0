"""The tormented command: `stepfs-produce run`, restarted after every ending, and the worker processes below it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ray_nodes import processes

from torture.processes import UNREACHABLE, kill_group, spawn

_TERMINATED = 128 + signal.SIGTERM
_MARK = "TORTURE_MARK"  # in the environment of everything that a command starts


@dataclass
class Command:
    """One role, through all its incarnations."""

    words: list[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float | None = 0.0  # when to start it (again); None: it runs
    wanted: bool = True
    terminated: bool = False
    endings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def tend(self, now: float) -> None:
        """Notice its end; start it when that is due."""
        if self.process is not None and self.process.poll() is not None:
            self._ended(self.process.returncode, now)
        if self.process is None and self.wanted and self.start_at is not None and now >= self.start_at:
            self.process = spawn(self.words, self.log, **self.environment, **{_MARK: str(self.log)})
            self.started_at, self.start_at = now, None

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self, now: float) -> None:
        """SIGKILL to the command alone: its workers must end by themselves. It starts again at once."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.endings["kill -9"] += 1
        self.process, self.start_at, self.terminated = None, now, False

    def terminate(self) -> None:
        assert self.process is not None
        self.terminated = True
        self.process.terminate()

    def kill_workers(self, draw: random.Random, *, all_of_them: bool) -> bool:
        """SIGKILL to one worker, or to all with the spare. Returns whether there was one."""
        assert self.process is not None
        workers = workers_of(self.process.pid) or actors()
        for worker in workers if all_of_them else draw.sample(workers, min(1, len(workers))):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        return bool(workers)

    def end(self) -> None:
        self.wanted = False
        if self.alive():
            assert self.process is not None
            kill_group(self.process)

    def remnants(self) -> list[str]:
        """Processes that any incarnation left behind."""
        return [f"{pid} {_command_line(pid).decode()[:100]}" for pid in [*self._marked(), *actors()]]

    def _marked(self) -> list[int]:
        mark = f"{_MARK}={self.log}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return " | ".join(lines[-4:])[-800:]

    def _ended(self, code: int, now: float) -> None:
        self.endings[f"exit code {code}"] += 1
        # Before Python has installed a handler, SIGTERM is what it is.
        expected = {UNREACHABLE} | ({_TERMINATED, -signal.SIGTERM} if self.terminated else set())
        if code not in expected:
            self.faults.append(f"the command ended with exit code {code}: {self.last_words()}")
        self.process, self.start_at, self.terminated = None, now + 0.3, False


def actors() -> list[int]:
    """The workers of the Ray cluster; they are no children of the command."""
    return processes(named="ray::_Worker")


def workers_of(pid: int) -> list[int]:
    """Its worker processes; each is a child of some thread of it."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, thread.read_text().split())
    return [child for child in sorted(found) if b"spawn_main" in _command_line(child)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
