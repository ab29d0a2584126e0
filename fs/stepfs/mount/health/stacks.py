"""Every thread's stack, and every task's, to the log: on SIGUSR1, and for a loop that is stuck.

The main thread's own is dumped by `faulthandler` from the signal handler itself, so even a loop that is stuck shows
where. A loop that turns adds the other threads (their frames rest only while it has the GIL: walking them as they run
ends in SIGSEGV) and the tree of its tasks, because what waits in trio is on no thread's stack. They are walked into
memory, and written by a thread of their own: stderr may be a pipe that nobody empties.
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

_TRIO: Final = str(Path(trio.__file__).parent)  # every task waits in there; where it came from is of interest


@contextmanager
def shown_on_signal(nursery: trio.Nursery, number: signal.Signals = signal.SIGUSR1) -> Iterator[None]:
    """While inside, `number` writes all stacks to stderr. Main thread only; `nursery` houses the listener."""
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
    """The stacks of all threads, as `faulthandler` writes them: with the GIL, so no frame moves meanwhile."""
    descriptor = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(descriptor)
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def write_aside(data: bytes) -> threading.Thread:
    """Write to stderr in a thread that may wait there for ever; nothing else does."""

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
