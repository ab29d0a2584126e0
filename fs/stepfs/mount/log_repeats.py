"""Limits repeated log lines to one a minute for each kind, with a count of the omitted ones.

A trainer that retries a damaged file makes thousands of failures a second, and the first line describes them all. A
log call opts in with `extra={"alike": key}`: lines with one key are of one kind. Changes of state ("the store answers
again") never opt in, because their order matters.

The count comes as the fact `repeated`, on the next line of that kind, or with the next line of any kind once the
minute is over, or when the log is closed.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0
KINDS_MAX: Final = 16_384  # kinds; beyond that the oldest is forgotten, and may be logged again early


@dataclass(slots=True)
class _Window:
    ends_s: float
    left_out: logging.LogRecord | None = None  # the newest omitted record
    count: int = 0


class Repeats:
    """Decides which records are logged. Not thread-safe: call it under the handler's lock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._windows: OrderedDict[Hashable, _Window] = OrderedDict()  # in the order of their ends

    def admitted(self, record: logging.LogRecord) -> Iterator[logging.LogRecord]:
        """The records to log when `record` arrives: counts of finished minutes, then the record unless it is
        omitted."""
        now_s = self._now_s()
        key: Hashable = getattr(record, "alike", None)
        window = None if key is None else self._windows.get(key)
        if window is not None and now_s < window.ends_s:
            window.count += 1
            window.left_out = record if record.exc_info is None else _without_traceback(record)
            record = None  # type: ignore[assignment]
        elif key is not None:
            if window is not None:
                del self._windows[key]
                if window.count:
                    record.repeated = window.count
            self._windows[key] = _Window(now_s + WINDOW_S)
        yield from self._over(now_s)
        if record is not None:
            yield record

    def rest(self) -> Iterator[logging.LogRecord]:
        """The counts not logged yet, at the end."""
        while self._windows:
            yield from _summary(self._windows.popitem(last=False)[1])

    def _over(self, now_s: float) -> Iterator[logging.LogRecord]:
        while self._windows:
            oldest = next(iter(self._windows.values()))
            if now_s < oldest.ends_s and len(self._windows) <= KINDS_MAX:
                return
            self._windows.popitem(last=False)
            yield from _summary(oldest)


def _summary(window: _Window) -> Iterator[logging.LogRecord]:
    if window.left_out is not None:
        window.left_out.repeated = window.count
        yield window.left_out


def _without_traceback(record: logging.LogRecord) -> logging.LogRecord:
    """The record without its traceback: frames hold buffers of data, and a record may wait here for a minute."""
    return logging.makeLogRecord({**vars(record), "exc_info": None, "exc_text": None})
