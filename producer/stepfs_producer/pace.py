"""Decentralized Adaptive Commit: when to try the next commit, from what every producer sees for free.

Source: BatchWeave (arXiv 2605.09994), "Decentralized Adaptive Commit"; its constants are not public, these are ours.

Model. The log is one serial resource. An attempt is *exposed* for v seconds: from the head it was based on until its
create is answered; it is lost if another producer's create lands in between. With N producers that each try every
T seconds, an attempt meets about (N - 1) v / T others. Holding that load at `LOAD` gives

    T = (N̂ - 1) v̂ / LOAD            seconds between the starts of two attempts of one producer

so the expected share of lost attempts is about 1 - exp(-LOAD), whatever N and v are; when v rises (slow store,
contention inside it), commits get rarer and bigger and throughput holds. One producer alone meets nobody; T is never
less than `INTERVAL_S_MIN` all the same, because every version costs its writer three requests and each reader one.

N̂  distinct producers in the recent log, from the versions of their newest commits (in the state, no request). The n
    most recent count if the n-th is at most `AGE_FACTOR` n + `AGE_SLACK` versions old, so the window grows with what it
    finds. Counting commits instead is only neutrally stable: slow producers see fast ones, slow down further, and
    stay slow.
v̂  lower median of the last own exposures: some servers let the loser of a race wait for seconds, and a mean would
    answer one such wait with a minute of silence.

Limits. A TGB waits at most `delay_max_s` for its attempt, pace or no pace; if T exceeds that, the bound defeats the
pacing and the producer says so. After a loss: a random, doubling pause of a few exposures, at most T; from the second
loss in a row T is stretched as well, because N̂ or v̂ is evidently too small. Times are seconds on one monotonic
clock that the caller reads; nothing here reads a clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from stepfs.format.ids import Version
from stepfs.format.snapshot import LogState

LOAD: Final = 0.2
INTERVAL_S_MIN: Final = 0.02
JITTER: Final = 0.15
AGE_FACTOR: Final = 2
AGE_SLACK: Final = 4
RECENT_MS: Final = 60_000  # who last committed longer ago than this (on the log's own clock) is no contender
EXPOSURES_KEPT: Final = 15
STRETCH_UP: Final = 1.25
STRETCH_DOWN: Final = 0.75
STRETCH_MAX: Final = 4.0
BACKOFF_EXPOSURES: Final = 2.0
_DOUBLINGS_MAX: Final = 10

Draw = Callable[[float, float], float]  # (low, high) → uniform


def contenders(ages: Iterable[int]) -> int:
    """How many producers are at work, from how many versions ago each one last committed (0 = the head)."""
    found = 0
    for rank, age in enumerate(sorted(ages), 1):
        if age <= AGE_FACTOR * rank + AGE_SLACK:
            found = rank
    return found


def ages(head: LogState, me: str) -> list[int]:
    """Versions since the last commit of every producer that may be at work, `me` excluded."""
    oldest = Version(head.version)
    return [
        oldest - producer.version
        for name, producer in head.producers.items()
        if name != me and not producer.retired and head.time_ms - producer.time_ms <= RECENT_MS
    ]


def interval_s(others: int, exposure_s: float, load: float = LOAD) -> float:
    """T of the model, before jitter: seconds."""
    return max(INTERVAL_S_MIN, others * exposure_s / load)


class Pacer:
    """The pace of one producer."""

    def __init__(self, *, delay_max_s: float, draw: Draw) -> None:
        self.delay_max_s = delay_max_s
        self.others = 0
        self._draw = draw
        self._exposures: deque[float] = deque(maxlen=EXPOSURES_KEPT)
        self._losses = 0
        self._stretch = 1.0
        self._paced_until_s = float("-inf")
        self._backed_off_until_s = float("-inf")

    @property
    def interval_s(self) -> float:
        """T as of now, without jitter."""
        if not self._exposures:
            return 0.0
        return interval_s(self.others, statistics.median_low(self._exposures)) * self._stretch

    @property
    def defeated(self) -> bool:
        """The hard bound on delay is shorter than the pace: attempts will collide more than they should."""
        return self.interval_s > self.delay_max_s

    def note_head(self, head: LogState, me: str) -> None:
        """Count the contenders in the log as just read."""
        self.others = contenders(ages(head, me))

    def won(self, *, started_s: float, exposure_s: float) -> None:
        """An attempt that began at `started_s` committed."""
        self._exposures.append(exposure_s)
        self._losses = 0
        self._stretch = max(1.0, self._stretch * STRETCH_DOWN)
        jitter = self._draw(1.0 - JITTER, 1.0 + JITTER)
        self._paced_until_s = started_s + self.interval_s * jitter
        self._backed_off_until_s = float("-inf")

    def lost(self, *, ended_s: float, exposure_s: float) -> None:
        """An attempt was lost to another producer, and that was known at `ended_s`."""
        self._exposures.append(exposure_s)
        self._losses += 1
        if self._losses > 1:
            self._stretch = min(STRETCH_MAX, self._stretch * STRETCH_UP)
        typical_s = statistics.median_low(self._exposures)
        doubled_s = BACKOFF_EXPOSURES * typical_s * 2.0 ** min(self._losses, _DOUBLINGS_MAX)
        # With nobody else in view yet T is 0; racing starts still need to be pulled apart.
        longest_s = min(max(self.interval_s, BACKOFF_EXPOSURES * typical_s), doubled_s)
        self._backed_off_until_s = ended_s + self._draw(0.0, longest_s)
        self._paced_until_s = self._backed_off_until_s

    def due_s(self, *, oldest_s: float, crowded: bool) -> float:
        """When to try, given since when the oldest TGB waits; the past means now."""
        paced_s = self._paced_until_s if not crowded else float("-inf")
        return max(self._backed_off_until_s, min(paced_s, oldest_s + self.delay_max_s))
