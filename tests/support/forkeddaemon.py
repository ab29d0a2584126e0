"""Daemons of mounts that the command which starts them forks: a new interpreter and its imports take 0.6 s of CPU.

Tests about how daemons begin, end, are found and follow each other have new interpreters (`real_daemons`), and so have those
that change what an interpreter runs first. What a guardian or systemd starts is always one.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, NoReturn

from stepfs.mount import daemon

REAL = "TESTS_REAL_DAEMONS"


class ForkedDaemon:
    """Of `subprocess.Popen` what `stepfs.mount.daemon.start` needs."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        cwd: str,
        start_new_session: bool,
        pass_fds: tuple[int, ...],
    ) -> None:
        assert (command[2], stdin, start_new_session) == (daemon.__name__, subprocess.PIPE, True)
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _serve(command[3:], (read_end, stdout.fileno(), stderr.fileno()), cwd, pass_fds)
        os.close(read_end)
        self.stdin = os.fdopen(write_end, "wb")
        self.returncode: int | None = None

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _serve(arguments: Sequence[str], standard: tuple[int, int, int], directory: str, kept: tuple[int, ...]) -> NoReturn:
    code = 70
    try:
        os.setsid()
        os.chdir(directory)
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in {0, 1, 2, *kept}:
                with suppress(OSError):  # of the listing itself
                    os.close(number)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = daemon.main(list(arguments))
    finally:
        logging.shutdown()
        os._exit(code)


def fork_daemons(environment: Mapping[str, str]) -> None:
    """Mounts of this process have forked daemons, to its end; not where an interpreter would begin with code of a test."""
    begins = any((Path(place) / "sitecustomize.py").exists() for place in environment.get("PYTHONPATH", "").split(":"))
    if REAL not in environment and not begins:
        setattr(daemon, "subprocess", SimpleNamespace(Popen=ForkedDaemon, PIPE=subprocess.PIPE))  # noqa: B010 (for mypy)
