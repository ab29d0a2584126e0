"""The request intervals of a mount in a large fleet: pure but for its jitter.

A store answers about 5,500 reads a second under one prefix, and each of them costs money. So the requests that find
nothing new grow with the number of mounts up to about a hundred mounts, and no further: the more mounts there are, the
longer each one waits between requests. A mount without a group does not know the others and behaves as if it were
alone.

The known number of mounts rises at once and falls by half the difference: too high a number costs latency for a while,
too low a number costs the store. It does not fall while the store throttles, because mounts that then write their
records less often look as if they were gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stepfs import entropy
from stepfs.lake.fleet import BEAT_SPREAD, usual_beat_s

NODES_MIN: Final = 100  # a smaller fleet changes nothing
SLOWER_MAX: Final = 8.0
_BEAT_SLOWER_MAX: Final = 2.0  # beyond it the others would count this mount as gone
_SLOWER_DECAY: Final = 0.9  # per look
_POLL_S_PER_NODE: Final = 1 / 1000
_LOOK_S_PER_NODE: Final = 1 / 200
_SPREAD: Final = 0.75  # random share above the shortest interval: mounts that started together drift apart
_USUAL_SPREAD: Final = 0.1  # the same for intervals longer than the fleet's shortest


class FleetInterval:
    """The intervals of one mount's own requests, from the number of mounts and the store's throttling."""

    def __init__(self, throttled: Callable[[], int] = lambda: 0) -> None:
        """`throttled`: the number of "slow down" answers of the store so far."""
        self.nodes = 1
        self.slower = 1.0  # factor on all intervals, because of throttling
        self._throttled = throttled
        self._throttled_before = 0

    @property
    def is_large(self) -> bool:
        """Whether the number of mounts lengthens the intervals."""
        return self.nodes >= NODES_MIN

    def counted(self, nodes: int) -> None:
        """Note the number of fresh records; this mount may not have written its own yet."""
        nodes = max(nodes, 1)
        if nodes >= self.nodes:
            self.nodes = nodes
        elif self.slower == 1.0:
            self.nodes = (self.nodes + nodes) // 2

    def note_look(self) -> None:
        """Note the end of a look: double the intervals if the store throttled since the last one, else shorten them."""
        throttled = self._throttled()
        if throttled > self._throttled_before:
            self.slower = min(2 * self.slower, SLOWER_MAX)
        else:
            self.slower = max(_SLOWER_DECAY * self.slower, 1.0)
        self._throttled_before = throttled

    def poll_s(self, usual_s: float) -> float:
        """Seconds between two looks for new steps."""
        return self.slower * self._spread(usual_s, self.nodes * _POLL_S_PER_NODE, _SPREAD)

    def group_look_s(self, usual_s: float) -> float:
        """Seconds between two looks at the group's record."""
        return self.slower * self._spread(usual_s, self.nodes * _LOOK_S_PER_NODE, _SPREAD)

    def beat_s(self) -> float:
        """Seconds between two records for the fleet view."""
        usual_s = usual_beat_s(1)
        beat_s = self._spread(usual_s, usual_beat_s(self.nodes), BEAT_SPREAD)
        return min(self.slower, _BEAT_SLOWER_MAX) * beat_s

    def _spread(self, usual_s: float, shortest_s: float, spread: float) -> float:
        if not self.is_large:
            return usual_s
        return max(
            usual_s * entropy.uniform(1.0, 1.0 + _USUAL_SPREAD),
            shortest_s * entropy.uniform(1.0, 1.0 + spread),
        )
