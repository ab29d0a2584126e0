"""The steps of a run: planned as soon as their samples are there, made by workers, appended in order."""

from __future__ import annotations

import enum
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import trio

from stepfs._internal import tracing
from stepfs._internal.limits import usable_cpus
from stepfs_producer.backoff import Outage
from stepfs_producer.commit.producer import GIVE_UP_AFTER_S
from stepfs_producer.commit.uploads import Ticket
from stepfs_producer.engine.api import Engine
from stepfs_producer.engine.local import local_engine
from stepfs_producer.engine.retry import KeptBody, PerAttempt, TaskRunner
from stepfs_producer.engine.worker import preload
from stepfs_producer.payloads.step import PayloadSpec
from stepfs_producer.plan.mix import ONE
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Rules
from stepfs_producer.plan.samples import Ahead
from stepfs_producer.plan.spans import Span
from stepfs_producer.plan.step import End, Need, State, StepPlan
from stepfs_producer.run.autoscale import LOOK_EVERY_S, WorkersWanted, workers_needed
from stepfs_producer.run.bottleneck import Bottleneck, Cause, Waits, bottleneck_of
from stepfs_producer.run.load import LoadedSource, OnLoad, OnSkip, SampleChunk, SourceLoader, spans_of
from stepfs_producer.run.memory import STEPS_PER_WORKER, StepRoom, memory_here
from stepfs_producer.run.prepare import PreparedPlan
from stepfs_producer.run.read_ahead import STEPS_AHEAD, marks_of

_log = logging.getLogger("stepfs.producer")

PAYLOAD_BYTES_PER_TOKEN: Final = 24  # of .safetensors; the others have fewer

TOLD_AFTER_S: Final = 60.0  # of waiting for a source; its tasks are made to take a quarter of a second
_SHARES_SEEN: Final = 2  # of a step, that the planner sees at first; samples beyond a step cannot change it


class PutStep(Protocol):
    """The answer of the worker that made a step."""

    @property
    def payload_bytes(self) -> int: ...


P = TypeVar("P", bound=PutStep)
P_contra = TypeVar("P_contra", bound=PutStep, contravariant=True)


class TicketProducer(Protocol[P_contra]):
    """An `AsyncProducer`, or the comparison of a replay."""

    async def reserve(
        self, *, position: Mapping[str, object], records: Sequence[int], payload_bytes: int
    ) -> Ticket: ...

    def renew(self, ticket: Ticket) -> Ticket: ...

    def settle(self, ticket: Ticket, descriptor: P_contra, /) -> None: ...

    async def flush(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepSink(Generic[P]):
    """The destination of a run's steps: a worker calls `put(spec, spans, destination, ticket, *bodies)`."""

    producer: TicketProducer[P]
    put: Callable[..., P]
    destination: object


class _PendingStep:
    """A step between its plan and its place in the lake."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.done = trio.Event()
        self.reserved = trio.Event()
        self.reserved_s = 0.0
        self.ticket: Ticket | None = None


class StepBuilder:
    """The steps under way."""

    def __init__(
        self,
        tasks: TaskRunner,
        sink: StepSink[Any] | None,
        spec: PayloadSpec,
        *,
        waits: Waits,
        steps_per_second: float | None,
        appended: Callable[[StepPlan], None],
        workers_max: int,
        rows_bytes_max: int | None,
    ) -> None:
        self._tasks = tasks
        self._sink = sink
        self._spec = spec
        self._waits = waits
        self._interval_s = 0.0 if steps_per_second is None else 1 / steps_per_second
        self._due_s = -math.inf
        self._unsettled: deque[_PendingStep] = deque()  # in order
        self._settled_s = -math.inf  # when the newest step got into its place
        self._payload_bytes = 0  # of the newest step that was uploaded
        self._appended = appended
        steps = STEPS_PER_WORKER * workers_max
        self._room = StepRoom(steps, rows_bytes_max)
        self._sender, self._receiver = trio.open_memory_channel[_PendingStep](steps)

    async def wait_for_room(self, plan: StepPlan) -> None:
        """Wait until this step may be made."""
        if self._sink is not None:
            with self._waits.on(Cause.ROOM):
                await self._room.take(self._row_bytes(plan))

    def start(self, plan: StepPlan, groups: Mapping[str, tuple[SampleChunk, ...]], nursery: trio.Nursery) -> None:
        """Make the next step, for which `wait_for_room` was called."""
        if self._sink is None:
            self._appended(plan)
            return
        making = _PendingStep(plan)
        self._sender.send_nowait(making)
        for body in _bodies(groups):  # loaders let go of the groups that the planner has taken
            body.hold()
        nursery.start_soon(self._make, making, groups)

    def no_more(self) -> None:
        """`run` returns once all started steps have their tickets."""
        self._sender.close()

    async def run(self) -> None:
        """Give the started steps their tickets, in order."""
        async for making in self._receiver:
            assert self._sink is not None
            await self._keep_pace()
            plan = making.plan
            with self._waits.on(Cause.STORE):
                making.ticket = await self._sink.producer.reserve(
                    position=plan.after.position(),
                    records=self._spec.records(plan.spans, plan.shape),
                    payload_bytes=self._payload_bytes or plan.room * PAYLOAD_BYTES_PER_TOKEN,
                )
            making.reserved_s = trio.current_time()
            making.reserved.set()
            self._unsettled.append(making)

    def _note_settled(self) -> None:
        """Take settled steps off in order: one behind a gap is not certain to be committed."""
        while self._unsettled and self._unsettled[0].done.is_set():
            making = self._unsettled.popleft()
            now_s = trio.current_time()
            if tracing.ring is not None:
                tracing.ring.add("steps", f"step {making.plan.step}", now_s - making.reserved_s, step=making.plan.step)
            self._waits.note(Cause.WORKERS, now_s - max(making.reserved_s, self._settled_s))
            self._settled_s = now_s
            self._room.give(self._row_bytes(making.plan))
            self._appended(making.plan)

    def _row_bytes(self, plan: StepPlan) -> int:
        rows = plan.spans[:, len(Span) :].sum(axis=0).tolist()
        return sum(count * spec.row_bytes for count, spec in zip(rows, self._spec.columns, strict=True))

    async def _keep_pace(self) -> None:
        """A pace is a limit, and lost time is not made up for."""
        if self._interval_s:
            with self._waits.on(Cause.PACE):
                await trio.sleep_until(self._due_s)
            self._due_s = max(self._due_s, trio.current_time()) + self._interval_s

    async def _make(self, making: _PendingStep, groups: Mapping[str, tuple[SampleChunk, ...]]) -> None:
        spans, bodies = await trio.to_thread.run_sync(spans_of, making.plan, groups)
        await making.reserved.wait()
        sink, ticket = self._sink, making.ticket
        assert sink is not None
        assert ticket is not None
        producer = sink.producer
        tickets = itertools.chain([ticket], iter(lambda: producer.renew(ticket), None))
        descriptor = await self._tasks.carry_out(
            f"making step {making.plan.step}",
            "",
            sink.put,
            self._spec,
            spans,
            sink.destination,
            PerAttempt(lambda: next(tickets)),  # a lost constructor's object may still come
            *bodies,
        )
        producer.settle(ticket, descriptor)
        self._payload_bytes = descriptor.payload_bytes
        for body in _bodies(groups):  # not before it is durable: its worker may die
            body.let_go()
        making.done.set()
        self._note_settled()


def _bodies(groups: Mapping[str, Sequence[SampleChunk]]) -> list[KeptBody]:
    return [group.body for of_source in groups.values() for group in of_source if group.body is not None]


class PlannerTask:
    """The planner of a run and the loaders that feed it."""

    def __init__(
        self,
        rules: Rules,
        loadings: Mapping[str, SourceLoader],
        *,
        tasks: TaskRunner,
        waits: Waits,
        held_bytes_max: int | None = None,
    ) -> None:
        self._rules = rules
        self._planner = Planner(rules)
        self._loadings: Sequence[SourceLoader] = [loadings[name] for name in sorted(rules.sources)]
        self._tasks = tasks
        self._waits = waits
        self._held_bytes_max = held_bytes_max
        self._changed = trio.Event()
        self.seconds = 0.0  # of CPU, of the last plan

    def changed(self) -> None:
        self._changed.set()

    def set_marks(self, step: int) -> None:
        """Ask every loader for its share of the steps from `step` on, and of the workers."""
        rules = self._rules
        shares = [rules.mix.shares(step + later) for later in range(STEPS_AHEAD)]
        coming = [sum(of_source) * rules.step_tokens // ONE for of_source in zip(*shares, strict=True)]
        marks = marks_of(coming, [loading.work for loading in self._loadings], self._tasks.workers)
        nbytes = sum(
            tokens * loading.work.bytes_per_token for loading, (tokens, _) in zip(self._loadings, marks, strict=True)
        )
        bound = self._held_bytes_max
        share = 1.0 if bound is None or nbytes <= bound else bound / nbytes
        for loading, (tokens, parallel) in zip(self._loadings, marks, strict=True):
            loading.want(tokens=int(tokens * share), parallel=parallel)

    async def next(self, state: State) -> StepPlan | End:
        """The step of `state`, as soon as the samples that have arrived decide it."""
        seen = self._seen(state.step)
        while True:
            self.set_marks(state.step)  # again after each wait: more of the work is known
            self._changed = trio.Event()
            added = {loading.name: loading.added for loading in self._loadings}
            ahead = {loading.name: loading.held.ahead(seen[loading.name]) for loading in self._loadings}
            known = {name: of_source for name, (of_source, _) in ahead.items()}
            planned = await self._planned(state, known)
            if not isinstance(planned, Need):
                return planned
            unseen = [name for name in planned.samples if not ahead[name][1]]
            for name in unseen:
                seen[name] *= 2
            if not unseen:
                await self._wait_for(planned, added)

    async def _planned(self, state: State, known: Mapping[str, Ahead]) -> StepPlan | Need | End:
        """Let a thread plan. Its CPU time is planning; for the rest it waits for a core, which workers' tasks hold."""

        def plan() -> tuple[StepPlan | Need | End, float]:
            began_s = time.thread_time()
            return self._planner.next(state, known), time.thread_time() - began_s

        began_s, before_s = trio.current_time(), self._tasks.held_s()
        planned, self.seconds = await trio.to_thread.run_sync(plan, abandon_on_cancel=True)
        if tracing.ring is not None:
            what = f"step {planned.step}" if isinstance(planned, StepPlan) else type(planned).__name__
            tracing.ring.add("planner", what, self.seconds)
        waited_s = trio.current_time() - began_s - self.seconds
        self._waits.note(Cause.PLANNER, self.seconds)
        if waited_s > 0:
            self._waits.note_behind([], waited_s, before_s, self._tasks.held_s())
        return planned

    def _seen(self, step: int) -> dict[str, int]:
        """Tokens of each source to show to the planner at first: it looks at every record that it is shown."""
        tokens = self._rules.step_tokens
        shares = self._rules.mix.shares(step)
        return {
            loading.name: _SHARES_SEEN * (tokens * share // ONE + self._rules.micro_batch_tokens)
            for loading, share in zip(self._loadings, shares, strict=True)
        }

    async def _wait_for(self, need: Need, before: Mapping[str, int]) -> None:
        """Wait until every source that the step lacks has more than `before` groups brought in, or has ended."""
        missing = {loading: before[loading.name] for loading in self._loadings if loading.name in need.samples}
        tell_s = trio.current_time() + TOLD_AFTER_S
        for loading, added in missing.items():
            if loading.added == added:
                loading.need()
        while True:
            missing = {
                loading: added
                for loading, added in missing.items()
                if loading.added == added and not loading.held.ended
            }
            if not missing:
                return
            with (
                trio.move_on_at(tell_s),
                self._waits.on_sources([one.name for one in missing], self._tasks.held_s),
            ):
                await self._changed.wait()
                self._changed = trio.Event()
                continue
            tell_s = math.inf
            _tell_waiting(missing)


def _tell_waiting(missing: Mapping[SourceLoader, int]) -> None:
    for loading in missing:
        _log.warning(
            "source %s: no step can be planned for %.0f s already; it is still %s. If that never ends, the file system is "
            "stuck, or a function or library hangs on these records",
            loading.name,
            TOLD_AFTER_S,
            loading.doing or "waiting for a worker",
        )


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
    outage: Outage | None = None  # of the lake's store, shared with who commits


@dataclass(frozen=True, slots=True)
class RunCallbacks:
    """Called for each bad record; for each appended step, with the seconds of the newest plan and the tokens held; for
    each group of samples; and for the plan's end.
    """

    skipped: OnSkip = lambda _source, _file, _offset, _reason: None
    appended: Callable[[StepPlan, float, Mapping[str, int]], None] = lambda _plan, _seconds, _held: None
    loaded: OnLoad = lambda _source, _tokens, _learned: None
    ended: Callable[[End], None] = lambda _end: None


class Pipeline:
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
        self.tasks = TaskRunner(engine, config.give_up_after_s, config.outage)
        self.waits = Waits()
        self._began_s = 0.0
        self._steps = 0  # appended by this run
        self.loaders = {
            source.spec.name: SourceLoader(
                source, self.tasks, changed=self._loaded, skipped=callbacks.skipped, loaded=callbacks.loaded
            )
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
                self._callbacks.ended(planned)
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
        pipeline = Pipeline(config, engine, sink, callbacks)
        await pipeline.run(state)
    return pipeline.reason
