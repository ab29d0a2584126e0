"""Daemons of mounts that the command which starts them forks: a new interpreter and its imports take 0.6 s of CPU.

Tests about how daemons begin, end, are found and follow each other have new interpreters (`real_daemons`), and so have those
that change what an interpreter runs first. The keeper is always a real one: it gets the forked daemon in its roll, as one
that it did not have to start, and starts new interpreters itself.
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

from stepfs.mount import launch
from stepfs.mount.daemon import __main__ as daemon
from stepfs.mount.keeper.messages import document, pair, read_document

REAL = "TESTS_REAL_DAEMONS"


def with_a_forked_daemon(
    command: Sequence[str], *, stdout: IO[bytes], pass_fds: Sequence[int], **others: object
) -> subprocess.Popen[bytes]:
    """`subprocess.Popen` of a keeper, as `stepfs.mount.launch.start` calls it."""
    *program, roll, directory = command
    ours, theirs = pair()
    if not os.fork():
        if not os.fork():  # nobody's child: it is not this command's to wait for
            _serve(
                [str(ours.fileno()), directory], stdout.fileno(), (ours.fileno(), *pass_fds[3:])
            )  # not what the keeper alone has
        os._exit(0)
    os.wait()
    number = document({**read_document(int(roll)), "daemon": theirs.fileno()})
    with theirs, ours, os.fdopen(number):
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            [*program, str(number), directory], stdout=stdout, pass_fds=[*pass_fds, number, theirs.fileno()], **others
        )


def _serve(arguments: Sequence[str], output: int, kept: Sequence[int]) -> NoReturn:
    code = 70
    try:
        os.setsid()
        os.chdir("/")
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(descriptor, number)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in {0, 1, 2, *kept}:
                with suppress(OSError):  # of the listing itself
                    os.close(number)
        for number in kept:
            os.set_inheritable(number, False)
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
        forks = SimpleNamespace(Popen=with_a_forked_daemon, DEVNULL=subprocess.DEVNULL)
        setattr(launch, "subprocess", forks)  # noqa: B010 (for mypy)
