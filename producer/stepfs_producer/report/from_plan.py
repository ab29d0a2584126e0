"""The figures of a plan before any run: its first steps planned over the real records, and the first samples of each source."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Final

import numpy as np

from stepfs_producer.plan.mix import ONE
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.spans import Span
from stepfs_producer.plan.step import StepPlan
from stepfs_producer.report.figures import (
    Contents,
    Report,
    Shares,
    StepLook,
    joined,
    slowest_of,
    spread,
    stages_of,
)
from stepfs_producer.run.check import Inspection, estimate_plan
from stepfs_producer.run.pipeline import conduct_here
from stepfs_producer.run.prepare import LocatedPlan, looked_up
from stepfs_producer.run.results import PlanTotals, Progress, bad_records_named, callbacks_of
from stepfs_producer.run.view import samples_of

ROWS: Final = 20
POINTS: Final = 64  # of a share's line in a chart
LOOKS_MAX: Final = 256  # of the steps in it
_REASONS: Final = 3  # of bad records, by source


async def report_of_plan(
    place: LocatedPlan,
    found: Inspection,
    steps: int,
    *,
    text: bool,
    say: Callable[[str], None],
    progress: Progress,
) -> Report:
    """`found`: of `inspect`, without mistakes. Errors as those of a run."""
    prepared = await looked_up(place)
    state = Planner(prepared.rules).begin()
    totals = PlanTotals(state, state)
    contents = Contents(
        str(place.file),
        prepared.digest,
        steps=estimate_plan(place.plan).steps,
        stages=stages_of(place.plan),
    )
    with progress("report", steps) as show, bad_records_named(totals, say):
        callbacks = callbacks_of(prepared, totals, show)

        def planned(plan: StepPlan, planning_s: float, held: Mapping[str, int]) -> None:
            _note(contents, place, plan)
            callbacks.appended(plan, planning_s, held)

        watched = replace(callbacks, appended=planned)
        ended = await conduct_here(prepared, place.directory, None, None, watched, state, steps_max=steps, of_step=0.0)
    _note_sources(contents, place, found, totals)
    contents.shares = joined(contents.shares, POINTS)
    sample = f"Its first {totals.steps} steps were planned over the real records; no lake was touched."
    contents.looked = [contents.looked[at] for at in spread(range(totals.steps), LOOKS_MAX)]
    rows, notes = [], [f"the plan ends within the steps that were planned: {ended}"] if ended else []
    if text:
        seen = await samples_of(place, None, ROWS, say)
        by_source = [list(group) for _, group in groupby(seen.rows, lambda row: row.documents[0].source)]
        each = -(-ROWS // max(len(by_source), 1))
        rows = [("", row) for group in by_source for row in group[:each]][:ROWS]
    return Report(str(place.file), time.time(), [contents], None, sample, notes, rows)


def _note(contents: Contents, place: LocatedPlan, plan: StepPlan) -> None:
    tokens = plan.spans[:, Span.TOKENS]
    by_source = np.bincount(plan.spans[:, Span.SOURCE], tokens, minlength=len(plan.sources)).astype(int).tolist()
    wanted = {name: share / ONE for name, share in zip(plan.sources, plan.shares, strict=True)}
    contents.shares.append(Shares(plan.step, plan.step + 1, dict(zip(plan.sources, by_source, strict=True)), wanted))
    slowest = slowest_of(place.plan, {"cost": plan.costs, **plan.loads})
    contents.looked.append(StepLook(plan.step, plan.tokens / plan.room, slowest))
    for number, name in enumerate(plan.sources):
        contents.of(name).note_lengths(tokens[plan.spans[:, Span.SOURCE] == number])


def _note_sources(contents: Contents, place: LocatedPlan, found: Inspection, totals: PlanTotals) -> None:
    needed = estimate_plan(place.plan).tokens or {}
    contents.tokens = totals.tokens
    for name, counts in totals.sources().items():
        source, facts = contents.of(name), found.facts.get(name)
        for field in ("tokens", "share", "records", "skipped", "dropped", "excluded", "epoch"):
            setattr(source, field, counts[field])
        source.seen, source.learned = totals.loaded.get(name, (0, 0))
        source.reasons = [f"{bad.file} at {bad.record}: {bad.reason}" for bad in totals.bad if bad.source == name][
            :_REASONS
        ]
        if facts is not None and facts.tokens and name in needed:
            source.epochs_needed = round(needed[name] / facts.tokens, 4)
