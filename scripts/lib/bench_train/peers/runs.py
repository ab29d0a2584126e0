"""Processes of the training job: started in a peer's environment, measured from outside, killed on demand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.machine import SCRIPTS, family, until
from bench_train.peers.driver import KILL_ME
from bench_train.peers.job import Order
from bench_train.peers.judgement import Journal
from bench_train.peers.nodes import Node
from bench_train.peers.usage import peak_pss

_PATIENCE_S = 240.0
_TRACKER_S = 10.0
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)(:|$)")


class FailedError(Exception):
    """A process of a peer ended badly; the message is one line, `said` all that it wrote."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


def reason(said: str) -> str:
    """The line of a traceback that names the exception, else the last line."""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    named = [line for line in lines if _EXCEPTION.match(line)]
    return (named or lines or [""])[-1]


@dataclass(frozen=True, slots=True)
class Trainer:
    """How drivers are run: by which interpreter, against which store."""

    python: Path
    variables: dict[str, str]
    log: Path

    def write(self, order: Order) -> None:
        self._end(self._start(order))

    def epoch(self, order: Order, node: Node) -> tuple[Journal, float, int]:
        """To its end: journal, CPU seconds of the node after imports, peak PSS in bytes."""
        before = node.cpu_s()
        process = self._start(order)
        with peak_pss(lambda: [*family(process.pid), *node.pids()]) as peak:
            self._end(process)
        journal = _journal(order)
        assert journal.cpu_s is not None, "it ended well, so it said how much it used"
        return journal, journal.cpu_s + node.cpu_s() - before, peak.bytes

    def killed(self, order: Order) -> Journal:
        """Until it asks to be killed; then it and all its workers get SIGKILL. Python's tracker of shared memory lives
        on, as it does when memory runs out on a node, and removes what they left.
        """
        process = self._start(order)
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != KILL_ME:
                self._end(process)
                raise FailedError("the data ended before the kill")
            trackers = [pid for pid in family(process.pid) if is_tracker(pid)]
            for pid in set(family(process.pid)) - set(trackers):
                os.kill(pid, signal.SIGKILL)
            process.wait()
            until(lambda: not any(map(is_alive, trackers)), _TRACKER_S)
        finally:
            _kill(process)
        return _journal(order)

    def _start(self, order: Order) -> subprocess.Popen[str]:
        command = [str(self.python), "-m", "bench_train.peers.driver", order.text()]
        environ = os.environ | self.variables | {"PYTHONPATH": str(SCRIPTS / "lib")}
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _end(self, process: subprocess.Popen[str]) -> None:
        try:
            process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise FailedError(f"no end after {_PATIENCE_S:g} s") from error
        finally:
            _kill(process)
        if process.returncode != 0:
            said = self.log.read_text(encoding="utf-8", errors="replace")
            raise FailedError(reason(said) or f"ended with {process.returncode}", said)


def is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    """A process that has ended and waits for its parent is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill(process: subprocess.Popen[str]) -> None:
    """Its whole session: workers that outlive their trainer go, too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _journal(order: Order) -> Journal:
    with Path(order.journal).open(encoding="utf-8") as lines:
        return Journal.parse(lines)
