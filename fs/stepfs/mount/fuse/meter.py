"""Exact counts of the kernel's requests, and the share of time in which at least one reader was blocked."""

from __future__ import annotations

import errno
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Final

from stepfs.format.ids import Step
from stepfs.histogram import Histogram

ACCESSLOG_LINES: Final = 1000

Subject = tuple[int | bytes, ...]  # inode or handle, then name, or offset and size


@dataclass(frozen=True, slots=True)
class Access:
    """One request, for the access log."""

    time_s: float  # wall clock, when it ended
    operation: str
    subject: Subject
    duration_s: float
    errno: int


class Meter:
    """Requests of one mount by operation: number, duration, errors."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.durations: defaultdict[str, Histogram] = defaultdict(Histogram)  # seconds, by operation
        self.errors: Counter[tuple[str, int]] = Counter()
        self.held = 0  # requests that handlers have taken and not answered yet
        self.faults = 0  # unexpected exceptions: bugs
        self.bytes_read = 0
        self.last_step: Step | None = None  # the step that a reader opened last
        self.opened = Step(0)  # one past the greatest step that a reader has opened
        self.waited = Waited()
        self.steps_invalidated = 0
        self.accesses: deque[Access] = deque(maxlen=ACCESSLOG_LINES)
        self.started_at = time.time()

    def note_open(self, step: Step) -> None:
        self.last_step = step
        self.opened = max(self.opened, Step(step + 1))

    def done(self, operation: str, subject: Subject, duration_s: float, error: int) -> None:
        """Count a finished request; `error` is an errno, 0 for success."""
        self.requests[operation] += 1
        self.durations[operation].observe(duration_s)
        if error:
            self.errors[operation, error] += 1
        self.accesses.append(Access(time.time(), operation, subject, duration_s, error))

    def accesslog(self) -> str:
        """The newest requests, oldest first: `time operation(subject) errno <seconds>`."""
        return "".join(
            f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(a.time_s))}.{int(a.time_s % 1 * 1e6):06d}Z "
            f"{a.operation}({shown(a.subject)}) {errno.errorcode.get(a.errno, 'OK')} <{a.duration_s:.6f}>\n"
            for a in list(self.accesses)
        )


def shown(subject: Subject) -> str:
    """The subject as a line of text; names are the callers' arbitrary bytes."""
    return ", ".join(
        part.decode(errors="backslashreplace").encode("unicode_escape").decode()
        if isinstance(part, bytes)
        else str(part)
        for part in subject
    )


class Waited:
    """The time in which at least one request was under way: the best single sign of late data."""

    def __init__(self) -> None:
        self._under_way = 0
        self._since_s = 0.0
        self._sum_s = 0.0

    def began(self) -> None:
        if not self._under_way:
            self._since_s = time.perf_counter()
        self._under_way += 1

    def ended(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._sum_s += time.perf_counter() - self._since_s

    def seconds(self) -> float:
        """The total so far, current requests included."""
        return self._sum_s + (time.perf_counter() - self._since_s if self._under_way else 0.0)
