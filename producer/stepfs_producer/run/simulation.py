"""The planner alone over real samples: sources are read and tokenised as in a run, no payload is made, no lake touched.

What it says of shares, fill and balance is what a run says of the same steps, because both count the same step plans.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from stepfs_producer.engine.api import Engine
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Rules
from stepfs_producer.plan.step import End
from stepfs_producer.run.planner_task import PlannerTask
from stepfs_producer.run.source_loader import LoadedSource, OnSkip, SourceLoader
from stepfs_producer.run.totals import PlanTotals
from stepfs_producer.settings import GIVE_UP_AFTER_S

LIMIT = "the limit is reached"


class Simulation:
    """The first steps of a plan."""

    def __init__(
        self,
        rules: Rules,
        sources: tuple[LoadedSource, ...],
        engine: Engine,
        *,
        held_bytes_max: int | None = None,
        skipped: OnSkip = lambda _source, _file, _offset, _reason: None,
    ) -> None:
        self.loadings = {
            source.spec.name: SourceLoader(
                source, engine, give_up_after_s=GIVE_UP_AFTER_S, changed=self._loaded, skipped=skipped
            )
            for source in sources
        }
        self._planning = PlannerTask(
            rules, self.loadings, workers=engine.workers, held_bytes_max=held_bytes_max
        )
        self._state = Planner(rules).begin()
        self.totals = PlanTotals(self._state, self._state)

    def _loaded(self) -> None:
        self._planning.changed()

    async def run(self, steps: int, planned: Callable[[], object] = lambda: None) -> str:
        """Plan up to `steps` steps, and call `planned` after each; why it ended."""
        async with trio.open_nursery() as loaders:
            for name, loading in self.loadings.items():
                loaders.start_soon(loading.run, self._state.sources[name])
            reason = await self._plan(steps, planned)
            loaders.cancel_scope.cancel()
        return reason

    async def _plan(self, steps: int, planned: Callable[[], object]) -> str:
        while self._state.step < steps:
            step = await self._planning.next(self._state)
            if isinstance(step, End):
                return step.reason
            self.totals.note(step, self._planning.seconds)
            self._state = step.after
            for name, loading in self.loadings.items():
                loading.advance(self._state.sources[name])
            planned()
        return LIMIT
