"""Ctrl-C ends a command within 2 s, wherever it stands.

While a command is loading, the signal ends it without output. From `listen` on the work is cancelled and has `END_S` to end;
then the process goes without it. This module imports nothing slow.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from trio.abc import Clock

T = TypeVar("T")
END_S: Final = 1.5
INTERRUPTED: Final = 128 + signal.SIGINT

# A terminal's descriptor, and what makes it as it was, while a command draws there.
_drawing: tuple[int, bytes] | None = None
_owns_process = False
_ending = False


def end_silently() -> None:
    """This process is a command. Until `listen`, SIGINT ends it. Not if it is ignored (`nohup`, `&` in a script)."""
    global _owns_process  # noqa: PLW0603 (the signal's handler is the process's, too)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _owns_process = True


def listen() -> None:
    """KeyboardInterrupt again, if `end_silently` took it away."""
    if _owns_process and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, _interrupt)


def run(work: Callable[..., Awaitable[T]], *arguments: object, clock: Clock | None = None) -> T:
    """`trio.run` for a command: Ctrl-C cancels the work, and has the process end in time."""
    import trio  # noqa: PLC0415

    before = signal.getsignal(signal.SIGINT)
    if before is not _interrupt:
        return trio.run(work, *arguments, clock=clock)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # trio takes over this one alone

    async def within_trio() -> T:
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)

        def interrupt(number: int, frame: FrameType | None) -> None:
            end_soon(INTERRUPTED)
            handler(number, frame)

        signal.signal(signal.SIGINT, interrupt)
        try:
            return await work(*arguments)
        finally:
            signal.signal(signal.SIGINT, handler)  # trio looks for it

    try:
        return trio.run(within_trio, clock=clock)
    finally:
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def drawing(descriptor: int, restores: bytes) -> Iterator[None]:
    """A command draws on a terminal, which is restored if a signal or `end_soon` ends the process in the middle."""
    global _drawing  # noqa: PLW0603
    taken = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    _drawing = descriptor, restores
    for number in taken:
        signal.signal(number, _end_by)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        _drawing = None


def _end_by(number: int, _: FrameType | None) -> None:
    _restore()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _restore() -> None:
    with suppress(Exception):
        if _drawing is not None:
            os.write(*_drawing)


def end_soon(code: int) -> None:
    """End this process with `code` after `END_S`, unless it has ended by itself; no other program than a command."""
    global _ending  # noqa: PLW0603
    if _owns_process and not _ending:
        _ending = True
        timer = threading.Timer(END_S, _end, (code,))
        timer.daemon = True
        timer.start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    end_soon(INTERRUPTED)
    signal.default_int_handler(number, frame)


def _end(code: int) -> None:
    _restore()
    os._exit(code)
