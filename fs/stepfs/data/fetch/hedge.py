"""When a slow GET is worth a second one: pure bookkeeping, time comes from the caller.

A second request after the p99 of past latencies cuts the tail for about one percent more requests (Dean and Barroso,
"The Tail at Scale", CACM 2013). The p99 is learned per size class, because 8 MiB take longer than 64 KiB. The
share of extra requests is bounded by a budget, so that a store that is slow as a whole is not given more work.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SAMPLES: Final = 128
_SAMPLES_MIN: Final = 16  # below, nothing is known yet
_DELAY_UNKNOWN_S: Final = 5.0
_DELAY_MIN_S: Final = 0.1
_DELAY_MAX_S: Final = 15.0
_MARGIN: Final = 1.5
SHARE_MAX: Final = 0.01  # hedges per request, in the long run: as many as the p99 implies
_BURST: Final = 3.0  # hedges that may be sent before any credit is earned


class HedgePolicy:
    """Latencies seen, and the budget of second requests."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._credit = _BURST

    def note(self, size: int, seconds: float) -> None:
        """A GET of `size` bytes took this long. Also earns the credit that hedges spend."""
        self._seconds.setdefault(_class(size), deque(maxlen=SAMPLES)).append(seconds)
        self._credit = min(_BURST, self._credit + SHARE_MAX)

    def p99_s(self, size: int) -> float | None:
        """Usual worst latency of such a GET; None while too little is known."""
        samples = self._seconds.get(_class(size))
        if samples is None or len(samples) < _SAMPLES_MIN:
            return None
        return sorted(samples)[-1 - len(samples) // 100]

    def delay_s(self, size: int) -> float:
        """How long to wait before a second request."""
        usual = self.p99_s(size)
        if usual is None:
            return _DELAY_UNKNOWN_S
        return min(max(usual * _MARGIN, _DELAY_MIN_S), _DELAY_MAX_S)

    def spend(self) -> bool:
        """Take the credit for one hedge; False when the budget is spent."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True


def _class(size: int) -> int:
    return size.bit_length() // 3  # 512 KiB … 4 MiB, 4 MiB … 32 MiB, …
