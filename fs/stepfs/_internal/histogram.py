"""Distributions of durations: counts per bucket, cheap enough for every request (one bisection)."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

# 100 µs (answered from memory) to the deadline of a read, three steps to a decade.
SECONDS: Final = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 100, 300,
)  # fmt: skip


class Histogram:
    """Observations of one kind. `counts` has one bucket more than there are bounds, for values above the last."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(SECONDS, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> Iterator[int]:
        """Observations at or below each bound, and finally all of them: Prometheus' buckets."""
        return accumulate(tuple(self.counts))
