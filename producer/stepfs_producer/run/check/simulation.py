"""The first steps of a plan, over the real records and without a lake."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from stepfs_producer.engine.local import local_engine
from stepfs_producer.engine.worker import preload
from stepfs_producer.plan.planner import Planner
from stepfs_producer.run.conductor import Conductor, RunConfig
from stepfs_producer.run.memory import memory_of
from stepfs_producer.run.prepare import LocatedPlan, looked_up
from stepfs_producer.run.results import (
    PlanTotals,
    Progress,
    SimulationResult,
    bad_records_named,
    callbacks_of,
    show_nothing,
)
from stepfs_producer.settings import GIVE_UP_AFTER_S


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
    workers = workers or len(os.sched_getaffinity(0))
    prepared = await looked_up(place)
    rules = prepared.rules
    state = Planner(rules).begin()
    totals = PlanTotals(state, state)
    config = RunConfig(
        rules,
        prepared.sources,
        prepared.payloads,
        steps_max=steps,
        held_bytes_max=memory_of(None, rules, prepared.sources, workers).held_bytes,
        give_up_after_s=GIVE_UP_AFTER_S,
    )
    with progress("simulate", steps) as show, bad_records_named(totals, say):
        warm = partial(preload, place.directory, prepared.modules)
        async with local_engine(workers, preload=warm) as engine:
            conductor = Conductor(config, engine, None, callbacks_of(prepared, totals, show))
            await conductor.run(state)
    reason = conductor.reason or "the limit is reached"
    return SimulationResult(prepared.digest, totals, reason, time.monotonic() - begun_s)
