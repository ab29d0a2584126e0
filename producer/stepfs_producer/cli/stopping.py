"""SIGINT and SIGTERM end a producer between two steps; appended steps are committed first.

The second SIGINT is the ordinary KeyboardInterrupt: it abandons pending appends, which is safe but repeats work later.
A line on stderr reports which of the two happened.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, Self

from stepfs.cli.failure import say

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Installed while in use, in the main thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._signal = 0
        self._told: Callable[[bool], None] | None = None
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
            _say("abandoned what was not committed yet; run the same command again to continue")

    def tell(self, told: Callable[[bool], None]) -> None:
        """Call `told` in the signal handler, with whether pending appends are abandoned; an event loop has no exceptions
        thrown into it. It must raise KeyboardInterrupt itself at the end of an abandoned run."""
        self._told = told

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for that signal."""
        return 128 + self._signal

    def wait(self, seconds: float) -> bool:
        """Sleep until a request to stop, at most `seconds`. Returns whether there is one."""
        return self._event.wait(max(seconds, 0))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._event.is_set() and number == signal.SIGINT:
            if self._told is None:
                raise KeyboardInterrupt
            self._told(True)
            return
        self._signal = self._signal or number
        self._event.set()
        if self._told is not None:
            self._told(False)
        _say("stopping as soon as what was appended is committed; Ctrl-C again abandons it")


def _say(line: str) -> None:
    say(f"stepfs-produce: {line}")
