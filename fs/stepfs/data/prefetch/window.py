"""Which steps to fetch next, nearest first: pure functions of where the readers are and how fast they go.

The window starts small and doubles with every step that confirms the guess, as TCP does; then it covers
`HORIZON_S` seconds of the readers' pace, so that a store that hangs that long stalls nobody, within a share of the
budget. A window given by the user is taken as it is.

Rejected: fewer GETs at a time while a reader is blocked, or as many as raise the throughput (simulated at 95 % of a link of
50 and 100 MB/s, 20 ms). Later steps share the link with the nearest one. Holding them back makes the first steps cheaper by
up to a third, and moves twice as much into steps after the tenth, which otherwise wait for nothing; stores that are slow
per connection lose their throughput meanwhile. Few GETs at the beginning have none of that (`fetch/concurrency`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from stepfs.data.prefetch.order import AccessRun
from stepfs.format.ids import SliceIndex, Step

HORIZON_S: Final = 20.0
WINDOW_MIN: Final = 4
WINDOW_MAX: Final = 1024
FILES_MAX: Final = 8192
_PACE_SAMPLES: Final = 16

Opened = Callable[[Step], Collection[SliceIndex]]
Plan = list[tuple[Step, tuple[SliceIndex, ...]]]


class StepRate:
    """How many new steps the readers open per second."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_PACE_SAMPLES)

    def note(self, now: float) -> None:
        self._times.append(now)

    def steps_per_s(self) -> float | None:
        """None until there is something to measure."""
        if len(self._times) < 3 or self._times[-1] <= self._times[0]:
            return None
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])


def window_steps(*, pace: float | None, latency_s: float, step_bytes: int, budget_bytes: int) -> int:
    """Steps ahead that hide `HORIZON_S` and twice the usual worst latency, within the budget."""
    affordable = budget_bytes // step_bytes if step_bytes else WINDOW_MAX
    needed = WINDOW_MIN if pace is None else math.ceil(pace * (HORIZON_S + 2 * latency_s)) + 1
    return max(1, min(max(needed, WINDOW_MIN), affordable, WINDOW_MAX))


def plan_ahead(
    runs: Sequence[AccessRun],
    opened: Opened,
    *,
    hinted: frozenset[SliceIndex],
    window: int,
    first: Step,
    frontier: Step,
    fixed: bool = False,
) -> Plan:
    """Steps in [first, frontier] that will be opened soon, with the slices not opened yet, nearest first.

    Within a run, unopened steps below its highest one come first: another worker is about to open them.
    """
    distances: dict[Step, int] = {}
    wanted: dict[Step, set[SliceIndex]] = {}
    for run in runs:
        ahead = window if fixed else min(window, 1 << min(len(run.steps), 12))
        for number in range(run.low, run.high + ahead * run.stride + 1, run.stride):
            step = Step(number)
            missing = (hinted or run.indices).difference(opened(step))
            if missing and first <= step <= frontier:
                distance = max(0, (step - run.high) // run.stride)
                distances[step] = min(distance, distances.get(step, distance))
                wanted.setdefault(step, set()).update(missing)
    order = sorted(wanted, key=lambda step: (distances[step], step))
    return _cut([(step, tuple(sorted(wanted[step]))) for step in order])


def plan_start(hinted: frozenset[SliceIndex], *, window: int, first: Step, frontier: Step) -> Plan:
    """Before the first open, when the slices are known: the steps where reading will begin."""
    if not hinted:
        return []
    stop = min(first + window, frontier + 1)
    return _cut([(Step(step), tuple(sorted(hinted))) for step in range(first, stop)])


def _cut(plan: Plan) -> Plan:
    """The nearest steps with at most `FILES_MAX` files, at least one: planning must not hold up the loop."""
    files = 0
    for number, (_, indices) in enumerate(plan):
        files += len(indices)
        if files > FILES_MAX:
            return plan[: max(1, number)]
    return plan
