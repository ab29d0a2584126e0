"""Which steps are read sooner: the order of eviction ahead of the readers, in memory and on disk.

The newest plan of reading ahead says it, whether it was learned or announced. By their numbers alone, steps of a shuffled
order displaced those that came next: with a window beyond the budget everything was fetched three times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, TypeAlias

from stepfs.format.ids import Step

Distance: TypeAlias = tuple[int, int]
NEAREST: Final[Distance] = (0, 0)  # of the step that is read next
_UNPLANNED: Final = 1


class ReadingOrder:
    """The steps of a plan, nearest first; all others are farther, by number."""

    def __init__(self, planned: Iterable[Step] = (), *, low: int = 0, announced: bool = False) -> None:
        """`low`: readers have passed over the steps below that are not planned. `announced`: trainers said this order."""
        self.announced = announced
        self._places = {step: place for place, step in enumerate(planned)}
        self._low = low

    def plans(self, step: Step) -> bool:
        """Whether the step is one of the plan."""
        return step in self._places

    def distance(self, step: Step) -> Distance:
        """Greater for a step that is read later."""
        place = self._places.get(step)
        return (_UNPLANNED, step) if place is None else (0, place)

    def farthest(self, steps: Collection[Step]) -> Step | None:
        """The one that is read last; None without any. Made of loops in C: it may be asked of 100,000 at each wake."""
        places = self._places
        unplanned = set(steps).difference(places)
        return max(unplanned) if unplanned else max(steps, key=places.__getitem__, default=None)

    def passed(self, step: Step) -> bool:
        """Whether no reader is expected at the step: it leaves first."""
        return step < self._low and step not in self._places
