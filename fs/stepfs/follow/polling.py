"""Seconds between two looks at the log, by the pace of the commits, the number of mounts, and the store's throttling."""

from collections.abc import Callable
from typing import Final

from stepfs._internal import entropy

INTERVAL_S_MAX: Final = 2.0
_GROWTH: Final = 1.5
_SMOOTHING: Final = 0.3
_SHARE_OF_PACE: Final = 1 / 8
MOUNTS_MIN: Final = 100  # a smaller run changes nothing
SLOWER_MAX: Final = 8.0
_SLOWER_DECAY: Final = 0.9  # per look
_POLL_S_PER_MOUNT: Final = 1 / 1000
_LOOK_S_PER_MOUNT: Final = 1 / 200
_LAZY_S_PER_MOUNT: Final = 1 / 100
_SPREAD: Final = 0.75  # random share above the shortest interval: mounts that started together drift apart
_USUAL_SPREAD: Final = 0.1  # the same for intervals longer than the shortest


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
        if self._arrived_at is not None:
            gap = now_s - self._arrived_at
            old = gap if self._between_s is None else self._between_s
            self._between_s = old + _SMOOTHING * (gap - old)
        self._arrived_at = now_s
        self.interval_s = self._poll_s

    def idle(self, now_s: float) -> None:
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


class Spacing:
    """Lengthens the intervals of a run of many mounts, and all of them while the store throttles."""

    def __init__(self, mounts: int = 1, throttled: Callable[[], int] = lambda: 0) -> None:
        """`throttled`: the number of "slow down" answers of the store so far."""
        self._mounts = mounts if mounts >= MOUNTS_MIN else 0
        self._slower = 1.0
        self._throttled = throttled
        self._throttled_before = 0

    def note_look(self) -> None:
        """Note the end of a look: double the intervals if the store throttled since the last one, else shorten them."""
        throttled = self._throttled()
        if throttled > self._throttled_before:
            self._slower = min(2 * self._slower, SLOWER_MAX)
        else:
            self._slower = max(_SLOWER_DECAY * self._slower, 1.0)
        self._throttled_before = throttled

    def poll_s(self, usual_s: float) -> float:
        """Seconds between two looks for new steps."""
        return self._longer(usual_s, self._mounts * _POLL_S_PER_MOUNT)

    def lazy_s(self) -> float:
        """Seconds between two looks while the readers here have far to the frontier, and nobody asks where that is."""
        return self._longer(INTERVAL_S_MAX, self._mounts * _LAZY_S_PER_MOUNT)

    def group_look_s(self, usual_s: float) -> float:
        """Seconds between two looks at the group's record."""
        return self._longer(usual_s, self._mounts * _LOOK_S_PER_MOUNT)

    def _longer(self, usual_s: float, shortest_s: float) -> float:
        if self._mounts:
            usual_s *= entropy.uniform(1.0, 1.0 + _USUAL_SPREAD)
            usual_s = max(usual_s, shortest_s * entropy.uniform(1.0, 1.0 + _SPREAD))
        return self._slower * usual_s
