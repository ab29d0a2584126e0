"""SIGINT and SIGTERM end a run: between two steps while it makes some, so that appended ones are committed first; else at once.

The second SIGINT abandons pending appends, which is safe but repeats work later. A line reports which of the two happened.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Final, Self

import trio

from stepfs.interruption import end_soon

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Installed while in use, in the main thread. `say` prints a line, also in the middle of another one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._signal = 0
        self._abandon: Callable[[], None] | None = None
        self._stop: Callable[[], None] | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # signal() accepts its own results

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for that signal."""
        return 128 + self._signal

    def notify(self, abandon: Callable[[], None]) -> None:
        """From now on a signal calls `abandon` in the event loop of this call."""
        self._abandon = _in_loop(abandon)
        if self.requested:  # it has come already
            abandon()

    @contextmanager
    def between_steps(self, stop: Callable[[], None]) -> Iterator[None]:
        """Inside, the first signal calls `stop` in the event loop instead, and only a second SIGINT abandons."""
        self._stop = _in_loop(stop)
        try:
            yield
        finally:
            self._stop = None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        first, self.requested = not self.requested, True
        self._signal = self._signal or number
        if self._stop is not None and not (number == signal.SIGINT and not first):
            self._stop()
            self._say("stopping as soon as what was appended is committed; Ctrl-C again abandons it")
            return
        if self._stop is not None:
            self._say("abandoned what was not committed yet; run the same command again to continue")
        end_soon(self.exit_code)
        if self._abandon is None:
            raise KeyboardInterrupt
        self._abandon()


def _in_loop(act: Callable[[], None]) -> Callable[[], None]:
    token = trio.lowlevel.current_trio_token()

    def later() -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(act)

    return later
