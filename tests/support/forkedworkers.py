"""Worker processes of runs that the server of `forked` forks: a new interpreter and its imports take 0.6 s of CPU.

Tests about how a worker starts have real ones (`test_local_engine`), as have commands that are programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import forked
import trio_parallel

WORKER_MAP: Any = import_module("trio_parallel._impl").WORKER_MAP
_proc: Any = import_module("trio_parallel._proc")


class _Context:
    """Of `multiprocessing` what trio-parallel takes."""

    Pipe = staticmethod(forked.CONTEXT.Pipe)

    @staticmethod
    def Process(  # noqa: N802 - as multiprocessing has it
        *, target: Callable[..., object], args: tuple[object, ...], name: str, daemon: bool
    ) -> Any:
        forked.start_server()
        begin = (os.getpid(), dict(os.environ), os.getcwd(), forked.Handed(1), forked.Handed(2))
        return forked.CONTEXT.Process(target=_begin, args=(begin, target, args), name=name, daemon=daemon)


def _begin(
    begin: tuple[int, dict[str, str], str, int, int], target: Callable[..., object], args: tuple[object, ...]
) -> None:
    command, environment, directory, stdout, stderr = begin
    forked.take_over(environment, directory, stdout, stderr)
    os.getppid = lambda: command  # the server's child; it waits on a pidfd of the command all the same
    target(*args)


class _Worker(_proc.SpawnProcWorker):  # type: ignore[misc]
    mp_context = _Context


_FORKED: Final = {trio_parallel.WorkerType.SPAWN: (_Worker, _proc.WorkerProcCache)}


def fork_workers() -> None:
    """Local workers of runs in this process are forked, to its end."""
    WORKER_MAP.update(_FORKED)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Local workers of runs in this process are forked."""
    before = dict(WORKER_MAP)
    fork_workers()
    try:
        yield
    finally:
        WORKER_MAP.update(before)
