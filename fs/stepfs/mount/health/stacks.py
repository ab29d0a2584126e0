"""Writes the stacks of all threads and tasks to the log: on SIGUSR1, and for a loop that is stuck.

`faulthandler` dumps the main thread's stack from the signal handler itself, so even a stuck loop shows its place. (The
kernel prefers the main thread. Another gets the signal, and shows itself, while the main one has one to handle: then ask
again.) A running loop adds the other threads (their frames stand still only while it has the GIL: walking them as they run ends
in SIGSEGV) and the tree of its tasks, because a task that waits in trio is on no thread's stack. The stacks are
collected in memory, and a thread of their own writes them: stderr may be a pipe that is never read.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import trio

_TRIO: Final = str(Path(trio.__file__).parent)  # every task waits in there; only its callers are of interest


@contextmanager
def shown_on_signal(nursery: trio.Nursery, number: signal.Signals = signal.SIGUSR1) -> Iterator[None]:
    """Inside the context the signal `number` writes all stacks to stderr; `nursery` listens. Main thread only."""
    with trio.open_signal_receiver(number) as asked:
        faulthandler.register(number, file=sys.stderr, all_threads=False, chain=True)
        nursery.start_soon(_show_tasks, asked)
        try:
            yield
        finally:
            faulthandler.unregister(number)


async def _show_tasks(asked: AsyncIterator[int]) -> None:
    async for _ in asked:
        with suppress(OSError, RuntimeError):  # no descriptor or no thread left
            write_aside(thread_stacks() + f"Tasks:\n{task_tree()}".encode())


def thread_stacks() -> bytes:
    """The stacks of all threads, as `faulthandler` writes them: with the GIL held, so no frame changes meanwhile."""
    descriptor = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(descriptor)
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def write_aside(data: bytes) -> threading.Thread:
    """Write to stderr in a thread of its own, because the write may block for ever."""

    def write(rest: bytes) -> None:
        with suppress(OSError):  # a full disk, a closed pipe
            while rest:
                rest = rest[os.write(sys.stderr.fileno(), rest) :]

    thread = threading.Thread(target=write, args=[data], name="stepfs stacks", daemon=True)
    thread.start()
    return thread


def task_tree(root: trio.lowlevel.Task | None = None) -> str:
    """All tasks below `root` (default: of this event loop), each with the frames it waits in, newest last."""
    top = trio.lowlevel.current_root_task() if root is None else root
    return "" if top is None else "".join(_lines(top, ""))


def _lines(task: trio.lowlevel.Task, indent: str) -> Iterator[str]:
    yield f"{indent}{task.name}\n"
    for frame in traceback.StackSummary.extract(task.iter_await_frames()):
        if not frame.filename.startswith(_TRIO):
            yield f"{indent}  {frame.filename}:{frame.lineno} {frame.name}\n"
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _lines(child, indent + "    ")
