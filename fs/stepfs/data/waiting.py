"""Why readers waited: each wait is given, when it ends, to the one cause that took most of it.

What a reader waits for notes what happens to it (`blocks.Block.enter`), so a wait looks back and nothing is measured on the
way of a read that does not wait. The loop's own lateness comes from a `Pulse`: a request of the kernel carries no time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import trio

from stepfs._internal import tracing
from stepfs._internal.histogram import Histogram

_BEAT_S: Final = 0.1  # while readers are at work
_IDLE_S: Final = 1.0
_LATE_S: Final = 0.05  # the timers of a healthy loop are less late

Parts = Mapping["Cause", float]  # seconds of a wait


class Cause(enum.StrEnum):
    """What a reader waited for, and so who can shorten it."""

    COMMIT = "commit"  # nobody has committed the step
    STORE = "store"  # a request of the store is under way, or waits for a connection
    THROTTLED = "throttled"  # the store asked for fewer requests
    UNREACHABLE = "unreachable"  # the store did not answer
    NEAR = "near"  # a request of the nearer place
    DISK = "disk"  # a read of the disk cache
    MEMORY = "memory"  # no room in the budget, for it or for having fetched it earlier
    DAEMON = "daemon"  # the loop was late: no processor, or the process was stopped
    TAKEOVER = "takeover"  # no daemon read requests: a hand-over, or a death

    __hash__ = str.__hash__  # not in Python: each wait makes some maps


@dataclass(eq=False, slots=True)
class Wait:
    """One wait of one reader, while it lasts."""

    what: str  # it waits for: "commit", "index", "data"
    step: int
    index: int | None  # the slice
    began_s: float
    base: Cause  # of what nothing else explains
    late_s: float  # of the loop, by its pulse, when it began
    parts: dict[Cause, float] = field(default_factory=dict)
    now: Callable[[], Parts] = dict  # of what it waits for at present
    waited: bool = False  # else everything was there

    @contextmanager
    def on(self, parts: Callable[[], Parts]) -> Iterator[None]:
        """Inside the context the reader is blocked; `parts` says why, up to now."""
        self.waited, self.now = True, parts
        try:
            yield
        finally:
            self.parts = _sum(self.parts, parts())
            self.now = dict

    def cause(self, seconds: float, late_s: float) -> Cause:
        """That of the greatest part. `late_s`: of the loop since the wait began."""
        parts = _sum(self.parts, self.now())
        parts = _sum({self.base: max(0.0, seconds - sum(parts.values()))}, parts)
        if late_s >= _LATE_S:  # it lies within the other parts
            left = max(0.0, 1 - late_s / seconds)
            parts = _sum({cause: part * left for cause, part in parts.items()}, {Cause.DAEMON: late_s})
        return max(parts, key=lambda cause: parts[cause])


def _sum(one: Parts, other: Parts) -> dict[Cause, float]:
    return {cause: one.get(cause, 0.0) + other.get(cause, 0.0) for cause in (*one, *other)}


class Pulse:
    """Measures how late the loop is. What happened between two beats is known no better: it bounds the wait of a reader."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = trio.current_time  # a mount's goes on while the process is stopped
        self._due_s = inf
        self._sum_s = 0.0

    @property
    def late_s(self) -> float:
        """In all, up to now."""
        return self._sum_s + self._overdue_s()

    def _overdue_s(self) -> float:
        if self._due_s == inf:
            return 0.0
        late_s = self.now() - self._due_s
        return late_s if late_s >= _LATE_S else 0.0

    async def beat(self, seconds: float) -> float:
        """Sleep so long; returns by how much longer it was."""
        self._due_s = self.now() + seconds
        await trio.sleep(seconds)
        late_s, self._due_s = self._overdue_s(), inf
        self._sum_s += late_s
        return late_s


class Ledger:
    """All waits of one mount or reader."""

    def __init__(self) -> None:
        self.durations: dict[tuple[str, Cause], Histogram] = {}  # of those that ended, by what for and cause
        self.pulse = Pulse()
        self._under_way: dict[Wait, None] = {}
        self._blocked_s = 0.0
        self._since_s = 0.0
        self._ended_s = -inf

    @contextmanager
    def waiting(self, what: str, step: int, base: Cause = Cause.STORE, index: int | None = None) -> Iterator[Wait]:
        """Inside the context a reader may wait, for a commit, for an index or for data."""
        now_s = trio.current_time()
        wait = Wait(what, step, index, now_s, base, self.pulse.late_s)
        if not self._under_way:
            self._since_s = now_s
        self._under_way[wait] = None
        try:
            yield wait
        finally:
            del self._under_way[wait]
            self._ended_s = trio.current_time()
            if not self._under_way:
                self._blocked_s += self._ended_s - self._since_s
            if wait.waited:
                cause, seconds = self._judged(wait, self._ended_s)
                self._observe(what, cause, seconds)
                if tracing.ring is not None:
                    track = f"waits for {what}" if index is None else f"slice {index}: waits"
                    tracing.ring.add(track, f"{cause}: step {step}", seconds, step=step, cause=str(cause))

    def _judged(self, wait: Wait, now_s: float) -> tuple[Cause, float]:
        late_s = self.pulse.late_s - wait.late_s
        seconds = max(now_s - wait.began_s, late_s)
        return wait.cause(seconds, late_s), seconds

    def _observe(self, what: str, cause: Cause, seconds: float) -> None:
        self.durations.setdefault((what, cause), Histogram()).observe(seconds)

    def note(self, cause: Cause, seconds: float) -> None:
        """Requests were held so long before this process saw them; which ones, nobody knows: it counts as one wait."""
        self._observe("request", cause, seconds)
        if tracing.ring is not None:
            tracing.ring.add("daemon", str(cause), seconds)
        if not self._under_way:
            self._blocked_s += seconds

    def sums(self) -> dict[str, Any]:
        """`seconds` and `count` by cause, each reader's wait by itself; `blocked_s`, in which at least one waited. Those under
        way count as they look now. In the loop alone.
        """
        now_s = trio.current_time()
        seconds, counts = dict.fromkeys(Cause, 0.0), dict.fromkeys(Cause, 0)
        for (_, cause), durations in self.durations.items():
            seconds[cause] += durations.sum
            counts[cause] += durations.count
        for wait in self._under_way:
            if wait.waited:
                cause, so_far_s = self._judged(wait, now_s)
                seconds[cause] += so_far_s
                counts[cause] += 1
        return {
            "seconds": {str(cause): round(value, 6) for cause, value in seconds.items()},
            "count": {str(cause): value for cause, value in counts.items()},
            "blocked_s": round(self._blocked_s + (now_s - self._since_s if self._under_way else 0.0), 6),
        }

    async def watch(self, answered: Callable[[], int], each: Callable[[], None] = lambda: None) -> None:
        """Beat until cancelled. `answered`: requests of readers so far: when the loop was late, and there were some around
        that time, and none of them is measured as a wait, it counts as one. `each`: called at each beat.
        """
        before = -1
        while True:
            busy, before = answered() != before, answered()
            late_s, ends_s = await self.pulse.beat(_BEAT_S if busy else _IDLE_S), trio.current_time()
            each()
            if late_s:
                await self.pulse.beat(_BEAT_S)
                measured = self._ended_s > ends_s - late_s or any(wait.what != "commit" for wait in self._under_way)
                if answered() != before and not measured:
                    self.note(Cause.DAEMON, late_s)
