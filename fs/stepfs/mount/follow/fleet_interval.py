"""How often a mount that is one of many may ask the store: pure but for its jitter.

A store answers about 5,500 reads a second under one prefix, and each of them costs money. So the requests that find
nothing new grow with the number of mounts up to about a hundred of them, and then no further: each mount asks less
often, the more there are. A mount without a group does not know the others and asks as if it were alone.

The number rises at once and falls by half the difference: too high a number costs latency for a while, too low a
number costs the store. It does not fall while the store asks for fewer requests, because mounts that speak less often
then look as if they were gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stepfs import entropy
from stepfs.lake.fleet import BEAT_SPREAD, usual_beat_s

NODES_MIN: Final = 100  # fewer change nothing
SLOWER_MAX: Final = 8.0
_BEAT_SLOWER_MAX: Final = 2.0  # else the others would take this mount for gone
_SLOWER_DECAY: Final = 0.9  # per look
_POLL_S_PER_NODE: Final = 1 / 1000
_LOOK_S_PER_NODE: Final = 1 / 200
_SPREAD: Final = (
    0.75  # so far above the shortest interval, at random: mounts that started together drift apart
)
_USUAL_SPREAD: Final = 0.1  # the same of an interval that is longer than the fleet's shortest


class FleetPace:
    """The intervals of one mount's own requests, given how many mounts there are and how the store is."""

    def __init__(self, throttled: Callable[[], int] = lambda: 0) -> None:
        """`throttled`: how many answers of the store so far were "slow down"."""
        self.nodes = 1
        self.slower = 1.0  # factor by which everything is slower than the number of mounts demands
        self._throttled = throttled
        self._throttled_before = 0

    @property
    def is_large(self) -> bool:
        """Whether the number of mounts changes anything."""
        return self.nodes >= NODES_MIN

    def counted(self, nodes: int) -> None:
        """So many mounts have a fresh record; this one may not have its own yet."""
        nodes = max(nodes, 1)
        if nodes >= self.nodes:
            self.nodes = nodes
        elif self.slower == 1.0:
            self.nodes = (self.nodes + nodes) // 2

    def note_look(self) -> None:
        """A look has ended: twice as slow if the store throttled since the last one, else back step by step."""
        throttled = self._throttled()
        if throttled > self._throttled_before:
            self.slower = min(2 * self.slower, SLOWER_MAX)
        else:
            self.slower = max(_SLOWER_DECAY * self.slower, 1.0)
        self._throttled_before = throttled

    def poll_s(self, usual_s: float) -> float:
        """Seconds from one look for new steps to the next."""
        return self.slower * self._spread(usual_s, self.nodes * _POLL_S_PER_NODE, _SPREAD)

    def group_look_s(self, usual_s: float) -> float:
        """Seconds from one look at the group's record to the next."""
        return self.slower * self._spread(usual_s, self.nodes * _LOOK_S_PER_NODE, _SPREAD)

    def beat_s(self) -> float:
        """Seconds from one record for the fleet view to the next."""
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
