"""A running plan: loaders, the planner, constructors and the producer, until something ends it.

Nothing here decides what a step holds. The planner does, from the committed position and the sources alone, so this
loop may be killed between any two awaits: what is not committed is planned again, and gives the same bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import trio

from stepfs_producer.engine.api import Engine
from stepfs_producer.payloads.step_task import PayloadSpec
from stepfs_producer.plan.rules import Rules
from stepfs_producer.plan.state import State
from stepfs_producer.plan.step import End, StepPlan
from stepfs_producer.producer import AsyncProducer
from stepfs_producer.run.planner_task import PlannerTask
from stepfs_producer.run.source_loader import LoadedSource, OnSkip, SourceLoader
from stepfs_producer.run.step_builder import StepBuilder


class EndReason(enum.StrEnum):
    """Why a run ended; everything appended until then is committed."""

    COMPLETE = "complete"
    LIMIT = "limit"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What a run is told once."""

    rules: Rules
    sources: tuple[LoadedSource, ...]
    payloads: PayloadSpec
    steps_max: int | None = None  # of the plan, earlier runs included
    steps_per_second: float | None = None
    held_bytes_max: int | None = None
    give_up_after_s: float = 600.0


@dataclass(frozen=True, slots=True)
class RunCallbacks:
    """Who wants to know: of bad records, and of appended steps with the seconds that planning the newest one took."""

    skipped: OnSkip = lambda _source, _file, _offset, _reason: None
    appended: Callable[[StepPlan, float], None] = lambda _plan, _seconds: None


class Conductor:
    """One run of a plan. `stop` ends it between two steps."""

    def __init__(
        self, running: RunConfig, engine: Engine, producer: AsyncProducer, watching: RunCallbacks
    ) -> None:
        self._running = running
        self._producer = producer
        self._stop = trio.Event()
        self.reason = ""  # of the end, in words
        self.loadings = {
            source.spec.name: SourceLoader(
                source,
                engine,
                give_up_after_s=running.give_up_after_s,
                changed=self._loaded,
                skipped=watching.skipped,
            )
            for source in running.sources
        }
        self.planning = PlannerTask(
            running.rules,
            self.loadings,
            workers=engine.workers,
            held_bytes_max=running.held_bytes_max,
        )
        self._building = StepBuilder(
            engine,
            producer,
            running.payloads,
            give_up_after_s=running.give_up_after_s,
            steps_per_second=running.steps_per_second,
            appended=lambda plan: watching.appended(plan, self.planning.seconds),
        )

    def stop(self) -> None:
        """End as soon as what is appended is committed."""
        self._stop.set()

    def _loaded(self) -> None:
        self.planning.changed()

    async def run(self, state: State) -> EndReason:
        """Run from `state` to the end of the plan, the limit, or `stop`; all that was appended is committed then."""
        endings: list[EndReason] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stopped, nursery.cancel_scope, endings)
            async with trio.open_nursery() as loaders:
                for name, loading in self.loadings.items():
                    loaders.start_soon(loading.run, state.sources[name])
                async with trio.open_nursery() as builders:
                    builders.start_soon(self._building.run)
                    ending = await self._plan(state, builders)
                    self._building.no_more()
                endings.append(ending)
                loaders.cancel_scope.cancel()
            nursery.cancel_scope.cancel()
        await self._producer.flush()
        return endings[0]

    async def _plan(self, state: State, builders: trio.Nursery) -> EndReason:
        limit = self._running.steps_max
        while limit is None or state.step < limit:
            await self._building.room()
            planned = await self.planning.next(state)
            if isinstance(planned, End):
                self.reason = planned.reason
                return EndReason.COMPLETE
            state = planned.after
            groups = {
                name: loading.held.until(state.sources[name]) for name, loading in self.loadings.items()
            }
            self._building.start(planned, groups, builders)
            for name, loading in self.loadings.items():
                loading.advance(state.sources[name])
        return EndReason.LIMIT

    async def _stopped(self, scope: trio.CancelScope, endings: list[EndReason]) -> None:
        await self._stop.wait()
        endings.append(EndReason.STOPPED)
        scope.cancel()
