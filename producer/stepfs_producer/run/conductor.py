"""A running plan: loaders, the planner, constructors and a sink for their steps.

The planner alone decides the content of a step, from the committed position and the sources. So this loop may be killed
between any two awaits: the next start plans uncommitted steps again, and makes the same bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from stepfs.limits import usable_cpus
from stepfs_producer.commit.producer import GIVE_UP_AFTER_S
from stepfs_producer.engine.api import Engine
from stepfs_producer.engine.failover import Tasks
from stepfs_producer.engine.local import local_engine
from stepfs_producer.engine.worker import preload
from stepfs_producer.payloads.step_task import PayloadSpec
from stepfs_producer.plan.rules import Rules
from stepfs_producer.plan.step import End, State, StepPlan
from stepfs_producer.run.load import LoadedSource, OnSkip, SourceLoader
from stepfs_producer.run.measured import LOOK_EVERY_S, Bottleneck, Waits, WorkersWanted, bottleneck_of, workers_needed
from stepfs_producer.run.memory import memory_here
from stepfs_producer.run.planner_task import PlannerTask
from stepfs_producer.run.prepare import PreparedPlan
from stepfs_producer.run.step_builder import StepBuilder, StepSink


class EndReason(enum.StrEnum):
    """The reason of an end; everything appended until then is committed."""

    COMPLETE = "complete"
    LIMIT = "limit"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The settings of one run."""

    rules: Rules
    sources: tuple[LoadedSource, ...]
    payloads: PayloadSpec
    steps_max: int | None = None  # of the plan, earlier runs included
    steps_per_second: float | None = None
    held_bytes_max: int | None = None  # of samples ahead of the planner
    rows_bytes_max: int | None = None  # of columns of the steps under way, with their copies
    give_up_after_s: float = GIVE_UP_AFTER_S
    workers_max: int | None = None  # to which their number follows the need; None: it stays


@dataclass(frozen=True, slots=True)
class RunCallbacks:
    """Called for each bad record; and for each appended step, with the seconds of the newest plan and the tokens held."""

    skipped: OnSkip = lambda _source, _file, _offset, _reason: None
    appended: Callable[[StepPlan, float, Mapping[str, int]], None] = lambda _plan, _seconds, _held: None


class Conductor:
    """One run of a plan. Without a sink it is a simulation: steps are planned only."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        sink: StepSink[Any] | None,
        callbacks: RunCallbacks,
    ) -> None:
        self._config = config
        self._sink = sink
        self._callbacks = callbacks
        self._stop = trio.Event()
        self.reason = ""  # of the end, in words
        self.tasks = Tasks(engine, config.give_up_after_s)
        self.waits = Waits()
        self._began_s = 0.0
        self._steps = 0  # appended by this run
        self.loaders = {
            source.spec.name: SourceLoader(source, self.tasks, changed=self._loaded, skipped=callbacks.skipped)
            for source in config.sources
        }
        self._planner = PlannerTask(
            config.rules,
            self.loaders,
            tasks=self.tasks,
            waits=self.waits,
            held_bytes_max=config.held_bytes_max,
        )
        self._builder = StepBuilder(
            self.tasks,
            sink,
            config.payloads,
            waits=self.waits,
            steps_per_second=config.steps_per_second,
            appended=self._appended,
            workers_max=config.workers_max or engine.workers,
            rows_bytes_max=config.rows_bytes_max,
        )

    def stop(self) -> None:
        """End as soon as all appended steps are committed."""
        self._stop.set()

    def bottleneck(self, held_s: float = 0.0) -> Bottleneck | None:
        """The cause of most waiting until now; None before any. `held_s`: seconds that appends waited for trainers."""
        elapsed_s = trio.current_time() - self._began_s
        if self._config.steps_per_second is not None:  # wanted, whether it is reached or not
            elapsed_s = min(elapsed_s, self._steps / self._config.steps_per_second)
        return bottleneck_of(
            self.waits,
            held_s=held_s,
            work_s=self.tasks.seconds,
            elapsed_s=elapsed_s,
            workers=self.tasks.workers,
            worked_s=self.tasks.held_s(),
        )

    def _loaded(self) -> None:
        self._planner.changed()

    def _appended(self, plan: StepPlan) -> None:
        self._steps += 1
        held = {name: loader.held.tokens for name, loader in self.loaders.items()}
        self._callbacks.appended(plan, self._planner.seconds, held)

    async def run(self, state: State) -> EndReason:
        """Run from `state` to the end of the plan, the limit, or `stop`."""
        endings: list[EndReason] = []
        self._began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stopped, nursery.cancel_scope, endings)
            if self._config.workers_max is not None:
                nursery.start_soon(self._follow_need, self._config.workers_max)
            async with trio.open_nursery() as loading:
                for name, loader in self.loaders.items():
                    loading.start_soon(loader.run, state.sources[name])
                async with trio.open_nursery() as building:
                    building.start_soon(self._builder.run)
                    ending = await self._plan(state, building)
                    self._builder.no_more()
                endings.append(ending)
                loading.cancel_scope.cancel()
            nursery.cancel_scope.cancel()
        if self._sink is not None:
            await self._sink.producer.flush()
        return endings[0]

    async def _plan(self, state: State, building: trio.Nursery) -> EndReason:
        limit = self._config.steps_max
        while limit is None or state.step < limit:
            planned = await self._planner.next(state)  # before there is room: it is not waited for
            if isinstance(planned, End):
                self.reason = planned.reason
                return EndReason.COMPLETE
            await self._builder.wait_for_room(planned)
            state = planned.after
            groups = {name: loader.held.until(state.sources[name]) for name, loader in self.loaders.items()}
            self._builder.start(planned, groups, building)
            for name, loader in self.loaders.items():
                loader.advance(state.sources[name])
        return EndReason.LIMIT

    async def _follow_need(self, most: int) -> None:
        wanted = WorkersWanted(self.tasks.workers, most)
        while True:
            work_s, steps = sum(self.tasks.held_s().values()), self._steps
            await trio.sleep(LOOK_EVERY_S)
            need = workers_needed(
                sum(self.tasks.held_s().values()) - work_s,
                self._steps - steps,
                LOOK_EVERY_S,
                self._config.steps_per_second,
            )
            self.tasks.workers = wanted.next(trio.current_time(), need)

    async def _stopped(self, scope: trio.CancelScope, endings: list[EndReason]) -> None:
        await self._stop.wait()
        endings.append(EndReason.STOPPED)
        scope.cancel()


async def conduct_here(
    prepared: PreparedPlan,
    directory: str,
    workers: int | None,
    sink: StepSink[Any] | None,
    callbacks: RunCallbacks,
    state: State,
    *,
    steps_max: int,
    of_step: float = 1.0,
) -> str:
    """Run a plan from `state` on with workers of this machine, one per core by default. The reason of its end, in words.

    `of_step`: the part of each step of which files are made, for the memory that it takes.
    """
    workers = workers or usable_cpus()
    memory = memory_here(prepared.rules, prepared.sources, workers, of_step)
    config = RunConfig(
        prepared.rules,
        prepared.sources,
        prepared.payloads,
        steps_max=steps_max,
        held_bytes_max=memory.held_bytes,
        rows_bytes_max=memory.pending_bytes,
    )
    async with local_engine(workers, preload=partial(preload, directory, prepared.modules)) as engine:
        conductor = Conductor(config, engine, sink, callbacks)
        await conductor.run(state)
    return conductor.reason
