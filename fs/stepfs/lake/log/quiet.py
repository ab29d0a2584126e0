"""The log's quiet times: 3 s of every 30 s in which only those writers try that cannot commit at other times.

Why. An attempt is lost if another commit lands between its head and its create. A writer whose attempt takes longer
than the gaps between the others' commits never wins, however often it tries: beside one producer that commits every
30 ms, a producer at 100 ms a request could not even start. So the winners leave a gap now and then.

Model. *Log time* is the `time` of the newest commit, continued by the reader's own clock: `ahead` is the greatest
difference between the two that this writer has seen. All writers that have seen the same commits agree on it to within a
round trip, whatever the wall clocks say. A quiet time is the first `QUIET_S` of every `EVERY_S` of log time. In it a
producer keeps silent, unless

* it is locked out: it lost when the log had moved on by two turns (`stepfs_producer.pace`) since its last commit. Such
  a producer tries at once when a quiet time begins, until it wins; a start and an operator's commit try all the time;
* the log has rested within the last `RESTED_S`: it had a gap of `QUIET_S`, or this producer kept silent.

So an attempt of less than 3 s, with what it has to read before, gets through every 30 s. The price is a tenth of the
time for streams without gaps, and a batch that waits up to 3 s longer. A stream with gaps of 3 s pays nothing.

A producer that is alone in the log keeps silent, too. Those with the greatest need, a newcomer and an operator, are not in the
log, and any way to announce oneself would cost every commit a request, to save one batch in ten a wait of 3 s.

Clocks shift quiet times and nothing else. If the log's time stands still, because everybody is silent or because a clock
is a day ahead, the own clock continues it. If it jumps, at each commit even, the second exception bounds the silence to
3 s in any 13 s. A writer that began after a jump sees other quiet times than those before it: then only fairness is lost.

Times are seconds on one monotonic clock that the caller reads; this module reads no clock.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import isinf
from typing import Final

_log = logging.getLogger("stepfs.lake.log")

QUIET_S: Final = 3.0
EVERY_S: Final = 30.0
RESTED_S: Final = 10.0
SAY_AFTER_S: Final = 10.0


class QuietTimes:
    """One writer's view of them."""

    def __init__(self) -> None:
        self._ahead_ms: int | None = None  # log time minus own clock
        self._seen = (0.0, 0)  # own time and version of the newest look
        self._rested_s = 0.0

    def note(self, now_s: float, version: int, time_ms: int) -> None:
        """Note the head after an attempt: its version and its `time`."""
        seen_s, before = self._seen
        had_gap = now_s - seen_s >= QUIET_S * max(1, version - before)
        if self._ahead_ms is None or had_gap or self._ended(now_s) > self._ended(seen_s):
            self._rested_s = now_s
        self._seen = (now_s, version)
        ahead_ms = time_ms - int(now_s * 1000)
        self._ahead_ms = ahead_ms if self._ahead_ms is None else max(self._ahead_ms, ahead_ms)

    def kept_s(self, due_s: float) -> float:
        """`due_s`, or if this writer should be silent then, the end of that quiet time."""
        if self._ahead_ms is None or due_s - self._rested_s < RESTED_S:
            return due_s
        return due_s + max(0.0, QUIET_S - self._into_s(due_s))

    def after_s(self, from_s: float, pause_s: float) -> float:
        """The time at which `pause_s` have passed since `from_s`, quiet times not counted: silent writers stay spread."""
        if self._ahead_ms is None or isinf(from_s):
            return from_s + pause_s
        start_s = self.kept_s(from_s)
        open_s = max(0.0, self._into_s(start_s) - QUIET_S)
        return start_s + pause_s + (open_s + pause_s) // (EVERY_S - QUIET_S) * QUIET_S

    def open_s(self, from_s: float) -> float:
        """`from_s` if the log is quiet then, else the beginning of the next quiet time."""
        if self._ahead_ms is None:
            return float("inf")
        into_s = self._into_s(from_s)
        return from_s if into_s < QUIET_S else from_s + EVERY_S - into_s

    def _log_ms(self, at_s: float) -> int:
        assert self._ahead_ms is not None
        return int(at_s * 1000) + self._ahead_ms

    def _into_s(self, at_s: float) -> float:
        """Seconds since the beginning of the newest quiet time."""
        return self._log_ms(at_s) % int(EVERY_S * 1000) / 1000

    def _ended(self, at_s: float) -> int:
        """The number of quiet times that have ended."""
        return (self._log_ms(at_s) - int(QUIET_S * 1000)) // int(EVERY_S * 1000)


@dataclass(slots=True)
class Waiting:
    """Says once that a commit waits for a quiet time, and for whose."""

    what: str  # "the seal"
    since_s: float | None = None  # the first loss
    said: bool = False

    def note_lost(self, now_s: float) -> float:
        """Note a lost attempt. Returns the seconds since the first."""
        if self.since_s is None:
            self.since_s = now_s
        waited_s = now_s - self.since_s
        if waited_s >= SAY_AFTER_S and not self.said:
            self.said = True
            _log.warning(
                "%s has waited %.0f s: producers nearer to the store commit all the time; they leave the log to others for "
                "%.0f s in every %.0f s",
                self.what,
                waited_s,
                QUIET_S,
                EVERY_S,
            )
        return waited_s
