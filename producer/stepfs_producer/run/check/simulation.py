"""The first steps of a plan, over the real records and without a lake."""

from __future__ import annotations

import time
from collections.abc import Callable

from stepfs_producer.plan.planner import Planner
from stepfs_producer.run.conductor import conduct_here
from stepfs_producer.run.prepare import LocatedPlan, looked_up
from stepfs_producer.run.results import (
    PlanTotals,
    Progress,
    SimulationResult,
    bad_records_named,
    callbacks_of,
    show_nothing,
)


async def simulate_plan(
    place: LocatedPlan,
    steps: int,
    workers: int | None = None,
    *,
    say: Callable[[str], None],
    progress: Progress = show_nothing,
) -> SimulationResult:
    """Plan the first steps over the real records: no payload is made, no lake touched.

    `say` gets lines for people: the bad records that may explain an error.
    """
    begun_s = time.monotonic()
    prepared = await looked_up(place)
    state = Planner(prepared.rules).begin()
    totals = PlanTotals(state, state)
    with progress("simulate", steps) as show, bad_records_named(totals, say):
        callbacks = callbacks_of(prepared, totals, show)
        reason = await conduct_here(
            prepared, place.directory, workers, None, callbacks, state, steps_max=steps, of_step=0.0
        )
    reason = reason or "the limit is reached"
    return SimulationResult(prepared.digest, totals, reason, time.monotonic() - begun_s)
