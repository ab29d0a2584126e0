"""For what share of the time some reader was waiting for an answer: the one number that says whether data is late.

The union of the times of all requests under way, not their sum: eight ranks that wait for the same step for a second
wait for a second. What is answered from memory adds microseconds.
"""

from __future__ import annotations

import time


class Waited:
    """A stopwatch that runs while at least one request is under way."""

    def __init__(self) -> None:
        self._under_way = 0
        self._since_s = 0.0
        self._sum_s = 0.0

    def began(self) -> None:
        """One more request."""
        if not self._under_way:
            self._since_s = time.perf_counter()
        self._under_way += 1

    def ended(self) -> None:
        """One of them was answered."""
        self._under_way -= 1
        if not self._under_way:
            self._sum_s += time.perf_counter() - self._since_s

    def seconds(self) -> float:
        """So far, those that wait now included."""
        return self._sum_s + (time.perf_counter() - self._since_s if self._under_way else 0.0)
