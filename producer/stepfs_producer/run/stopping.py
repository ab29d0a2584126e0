"""SIGINT and SIGTERM end a run between two steps; appended steps are committed first.

The second SIGINT abandons pending appends, which is safe but repeats work later. A line reports which of the two happened.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Final, Self

import trio

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Installed while in use, in the main thread. `say` prints a line, also in the middle of another one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._signal = 0
        self._notify: Callable[[bool], None] | None = None
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
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._say("abandoned what was not committed yet; run the same command again to continue")

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for that signal."""
        return 128 + self._signal

    def notify(self, stop: Callable[[], None], abandon: Callable[[], None]) -> None:
        """From now on the first signal calls `stop` in the event loop of this call, and a second SIGINT `abandon`."""
        token = trio.lowlevel.current_trio_token()

        def in_loop(abandoned: bool) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(abandon if abandoned else stop)

        self._notify = in_loop

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        abandons = self.requested and number == signal.SIGINT
        if not abandons:
            self._signal = self._signal or number
            self.requested = True
        if self._notify is not None:
            self._notify(abandons)
        elif abandons:
            raise KeyboardInterrupt
        if not abandons:
            self._say("stopping as soon as what was appended is committed; Ctrl-C again abandons it")
