"""trio's clock for a daemon that may be suspended: it does not count the time in which the process did not run.

Batch systems stop jobs for hours to let others go first (SIGSTOP, the cgroup freezer), hypervisors pause machines. By
the machine's clock every deadline is over afterwards, and a reader that was suspended together with the daemon would
get the error of a silent store although the store is healthy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import trio

SILENCE_S_MAX: Final = 15.0  # a healthy loop reads the clock more often: the watchdog beats every 10 s


class RunningTime(trio.abc.Clock):
    """Seconds; between two readings at most `silence_s_max` pass. Any thread may read it."""

    def __init__(self, silence_s_max: float | None = None, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Default `SILENCE_S_MAX`."""
        self._silence_s_max = SILENCE_S_MAX if silence_s_max is None else silence_s_max
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._looked = monotonic()
        self._now = self._looked

    def start_clock(self) -> None:
        """For trio."""

    def current_time(self) -> float:
        with self._lock:
            looked = self._monotonic()
            self._now += min(looked - self._looked, self._silence_s_max)
            self._looked = looked
            return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time()
