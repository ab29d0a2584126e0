"""The interval between two looks for new steps: pure.

A fixed 100 ms on hundreds of nodes costs real money at the store, and is useless when steps come every minute. So the
interval starts at `--poll`, grows while no step arrives, and returns to `--poll` at once when a step arrives or a
reader waits. It grows towards the rate of the steps themselves (an eighth of the time between the last two, so a new
step is seen within an eighth of a step time), and never beyond 2 s.
"""

from __future__ import annotations

from typing import Final

INTERVAL_S_MAX: Final = 2.0
_GROWTH: Final = 1.5
_SMOOTHING: Final = 0.3
_SHARE_OF_PACE: Final = 1 / 8


class PollInterval:
    """The interval until the next look, in seconds."""

    def __init__(self, poll_s: float) -> None:
        assert poll_s > 0
        self._poll_s = poll_s
        self.interval_s = poll_s
        self._between_s: float | None = None
        self._arrived_at: float | None = None

    @property
    def is_shortest(self) -> bool:
        """Whether the interval is `--poll` itself."""
        return self.interval_s <= self._poll_s

    def arrived(self, now_s: float) -> None:
        """Note a look that found a new step."""
        if self._arrived_at is not None:
            gap = now_s - self._arrived_at
            old = gap if self._between_s is None else self._between_s
            self._between_s = old + _SMOOTHING * (gap - old)
        self._arrived_at = now_s
        self.interval_s = self._poll_s

    def idle(self, now_s: float) -> None:
        """Note a look that found nothing new."""
        self.interval_s = min(self.interval_s * _GROWTH, self._interval_max(now_s))

    def awaited(self) -> None:
        """A reader waits: use the shortest interval."""
        self.interval_s = self._poll_s

    def failed(self) -> None:
        """Note a failed look: wait the longest interval, to spare the store."""
        self.interval_s = max(self._poll_s, INTERVAL_S_MAX)

    def _interval_max(self, now_s: float) -> float:
        # A stream that has stopped must not be polled at its former rate: the time without a step counts as a gap.
        silence = 0.0 if self._arrived_at is None else now_s - self._arrived_at
        pace = INTERVAL_S_MAX / _SHARE_OF_PACE if self._between_s is None else max(self._between_s, silence)
        return max(self._poll_s, min(INTERVAL_S_MAX, pace * _SHARE_OF_PACE))
