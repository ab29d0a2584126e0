"""Decentralized Adaptive Commit: the time of the next commit, from facts that every producer sees for free.

COMMIT.md has the rule, producer/DESIGN.md its reasons. Times are seconds on one monotonic clock that the caller reads;
this module reads no clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from stepfs.format.snapshot import LogState
from stepfs.lake.log.append import Pauses

LOAD: Final = 0.2
INTERVAL_S_MIN: Final = 0.02
JITTER: Final = 0.15
AGE_FACTOR: Final = 2
AGE_SLACK: Final = 4
RECENT_MS: Final = 60_000  # without commits for longer, and than RECENT_INTERVALS, a producer is no contender
RECENT_INTERVALS: Final = 3
EXPOSURES_KEPT: Final = 15
EXPOSURES_RECENT: Final = 3
EXPOSURE_S_MIN: Final = 0.001  # the start of doubling
EXPOSURE_S_FIRST_MAX: Final = 1.0
TURNS_MAX: Final = 2.0
RATE_VERSIONS_MIN: Final = 16  # fewer versions give no reliable rate of the others
CROWDED_SHARE_MIN: Final = 0.25  # of T
BACKOFF_EXPOSURES: Final = 2.0
_DOUBLINGS_MAX: Final = 10
MOUNTS_MIN: Final = 100  # fewer change nothing
_FLEET_S_PER_MOUNT: Final = 1 / 1000

Draw = Callable[[float, float], float]  # (low, high) → uniform


def contenders(ages: Iterable[int]) -> int:
    """The number of active producers, from the versions since each one's last commit (0 = the head)."""
    found = 0
    for rank, age in enumerate(sorted(ages), 1):
        if age <= AGE_FACTOR * rank + AGE_SLACK:
            found = rank
    return found


def ages(head: LogState, me: str, recent_ms: float = RECENT_MS) -> list[int]:
    """Versions since the last commit of every producer that may be active, `me` excluded.

    recent_ms: by the log's own clock; a producer without a commit for longer has stopped.
    """
    return [
        head.version - producer.version
        for name, producer in head.producers.items()
        if name != me and not producer.retired and head.time_ms - producer.time_ms <= recent_ms
    ]


def interval_s(others: int, exposure_s: float, load: float = LOAD) -> float:
    """T of the model, before jitter: seconds."""
    return max(INTERVAL_S_MIN, others * exposure_s / load)


@dataclass(frozen=True, slots=True)
class Pacing:
    """The interval of a producer's commits, and its reasons. Seconds."""

    others: int  # other active producers
    exposure_s: float  # of one attempt
    interval_s: float  # between two attempts that succeed
    gives_way: bool  # max_delay is shorter than the interval, so batches wait longer than max_delay


class Pacer:
    """The pace of one producer. `draw` is its only randomness."""

    def __init__(self, *, delay_max_s: float, draw: Draw) -> None:
        self.delay_max_s = delay_max_s
        self.others = 0
        self.exposure_s = 0.0  # v̂
        self.losses = 0  # in a row
        self.losing_since_s = float("-inf")
        self.is_locked_out = False  # since the last win
        self.mounts = 0  # that follow the log
        self.pauses = Pauses()
        self._draw = draw
        self._exposures: deque[float] = deque(maxlen=EXPOSURES_KEPT)
        self._seen: tuple[float, int] | None = None  # time and version of the last look at the others' rate
        self._versions_per_s = 0.0
        self._turn_version = 0  # of the own last commit, or the head when this producer started
        self._age = 0  # versions since then
        self._jitter = 1.0
        self._started_s = float("-inf")  # of the last successful attempt
        self._backed_off_until_s = float("-inf")

    @property
    def interval_s(self) -> float:
        """The present T, without jitter."""
        if not self._exposures:
            return 0.0
        own_s = interval_s(self.others, self.exposure_s)
        if not self._versions_per_s:
            return own_s
        return max(INTERVAL_S_MIN, min(own_s, TURNS_MAX * (self.others + 1) / self._versions_per_s))

    @property
    def gives_way(self) -> bool:
        return self.interval_s > self.delay_max_s

    @property
    def fleet_s(self) -> float:
        """The shortest interval that many mounts bear: each GETs every commit."""
        return (self.others + 1) * self.mounts * _FLEET_S_PER_MOUNT if self.mounts >= MOUNTS_MIN else 0.0

    @property
    def is_alone(self) -> bool:
        """Whether nobody else commits here, as far as this producer has seen."""
        return not self.others and not self.losses

    @property
    def pacing(self) -> Pacing:
        return Pacing(self.others, self.exposure_s, self.interval_s, self.gives_way)

    @property
    def recent_ms(self) -> float:
        """How long a producer without commits stays a contender: a long T must not hide the others."""
        return max(RECENT_MS, 1000.0 * RECENT_INTERVALS * self.interval_s)

    def note_head(self, head: LogState, me: str, now_s: float, pauses_asked: int) -> None:
        """Update the estimates from the log's newest state, and the requests for pauses, known at `now_s`."""
        mine = head.producers.get(me)
        others = contenders(ages(head, me, self.recent_ms))
        self.note(now_s, head.version, others, None if mine is None else mine.version)
        self.pauses.note(now_s, pauses_asked)

    def note(self, now_s: float, version: int, others: int, mine: int | None) -> None:
        """The same from numbers: the head's version, the contenders, and the version of the own last commit."""
        self.others = others
        if self._seen is None:
            self._seen = (now_s, version)
            self._turn_version = version
        self._turn_version = max(self._turn_version, mine if mine is not None else 0)
        self._age = version - self._turn_version
        since_s, before = self._seen
        if version - before >= RATE_VERSIONS_MIN and now_s > since_s:
            self._versions_per_s = (version - before) / (now_s - since_s)
            self._seen = (now_s, version)

    def won(self, *, started_s: float, exposure_s: float) -> None:
        self._measure(exposure_s)
        self.losses = 0
        self.is_locked_out = False  # for the rest of this pause: it is for others like us
        self._jitter = self._draw(1.0 - JITTER, 1.0 + JITTER)
        self._started_s = started_s

    def lost(self, *, ended_s: float, exposure_s: float) -> None:
        self._measure(exposure_s)
        if not self.losses:
            self.losing_since_s = ended_s
        self.losses += 1
        # Racing starts do not see each other yet and must be separated.
        shortest_s = BACKOFF_EXPOSURES * self.exposure_s
        overdue = self._age / (self.others + 1)
        longest_s = max(shortest_s, self.interval_s / max(1.0, overdue) ** 2)
        doubled_s = shortest_s * 2.0 ** min(self.losses, _DOUBLINGS_MAX)
        self._backed_off_until_s = self.pauses.after_s(ended_s, self._draw(0.0, min(longest_s, doubled_s)))
        self.is_locked_out = self.is_locked_out or overdue >= TURNS_MAX

    def due_s(self, *, now_s: float, oldest_s: float, crowded: bool) -> float:
        """The time of the next attempt, from `now_s` on, given the time since which the oldest TGB waits.

        crowded: much is pending. Such a producer may commit more often, as far as the log's load allows.
        """
        due_s = max(now_s, self._paced_s(oldest_s, crowded=crowded))
        if self.is_locked_out:
            return now_s if self.pauses.is_open(now_s) else due_s
        return self.pauses.kept_s(due_s)

    def _paced_s(self, oldest_s: float, *, crowded: bool) -> float:
        """The same on a log that does not pause; a past time means now."""
        if self.losses:
            return self._backed_off_until_s
        pace_s = self.interval_s * self._jitter
        if crowded:
            pace_s *= min(1.0, max(CROWDED_SHARE_MIN, self._versions_per_s * self.exposure_s / LOAD))
        due_s = self.pauses.after_s(self._started_s, pace_s)
        if not self.gives_way:
            due_s = min(due_s, self.pauses.after_s(oldest_s, self.delay_max_s))
        return max(due_s, self.pauses.after_s(self._started_s, self.fleet_s * self._jitter))

    def _measure(self, exposure_s: float) -> None:
        grown_s = max(2.0 * self.exposure_s, EXPOSURE_S_MIN) if self._exposures else EXPOSURE_S_FIRST_MAX
        self._exposures.append(exposure_s)
        recent = list(self._exposures)[-EXPOSURES_RECENT:]
        median_s = min(statistics.median_low(self._exposures), statistics.median_low(recent))
        self.exposure_s = min(grown_s, median_s)
