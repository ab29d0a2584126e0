"""One run of a plan into a lake, from the checks before it to its end, by itself or by a signal.

SIGINT and SIGTERM end it between two steps while it makes some, so that appended ones are committed first; else at
once. The second SIGINT, or a store that does not answer then, abandons pending appends: safe, but work is repeated later.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, Self

import trio

from stepfs._internal.clock import SystemClock
from stepfs._internal.interruption import end_soon
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Epoch
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs.store.silence import Silence
from stepfs_producer.backoff import Outage
from stepfs_producer.commit.producer import GIVE_UP_AFTER_S, AsyncProducer
from stepfs_producer.engine.api import Engine
from stepfs_producer.payloads.files import encoder_for
from stepfs_producer.plan.step import read_position
from stepfs_producer.run.bottleneck import Bottleneck
from stepfs_producer.run.lake import ensure_lake, keep_libraries, notice_silence, sealed_error
from stepfs_producer.run.load import LoadedSource
from stepfs_producer.run.machines import as_nodes_see, node_check, open_engine
from stepfs_producer.run.memory import Memory, memory_of
from stepfs_producer.run.options import RunOptions
from stepfs_producer.run.pipeline import EndReason, Pipeline, RunConfig, StepSink
from stepfs_producer.run.plan_changes import say_edits, where_it_begins
from stepfs_producer.run.prepare import (
    LocatedPlan,
    PreparedPlan,
    fit_plan,
    grid_of,
    keep_plan,
    looked_up,
    refuse_unfit,
)
from stepfs_producer.run.results import (
    PlanTotals,
    Progress,
    RunResult,
    bad_records_named,
    callbacks_of,
    show_nothing,
    totals_from,
)
from stepfs_producer.run.workers.upload import Destination, put_step

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S: Final = 10.0  # with a store that does not answer, once a signal has come: supervisors kill after 30 s


class Stopping:
    """Installed while in use, in the main thread. `say` prints a line, also in the middle of another one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._signal = 0
        self._abandon: Callable[[], None] | None = None
        self._stop: Callable[[], None] | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # signal() accepts its own results

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for that signal."""
        return 128 + self._signal

    def notify(self, abandon: Callable[[], None]) -> None:
        """Have a signal call `abandon` in the event loop of this call."""
        self._abandon = _in_loop(abandon)
        if self.requested:  # it has come already
            abandon()

    @contextmanager
    def between_steps(self, stop: Callable[[], None]) -> Iterator[None]:
        """Inside, the first signal calls `stop` in the event loop instead, and only a second SIGINT abandons."""
        self._stop = _in_loop(stop)
        try:
            yield
        finally:
            self._stop = None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        first, self.requested = not self.requested, True
        self._signal = self._signal or number
        if self._stop is not None and not (number == signal.SIGINT and not first):
            self._stop()
            self._say("stopping as soon as what was appended is committed; Ctrl-C again abandons it")
            return
        self.abandon()

    def abandon(self, why: str = "") -> None:
        """End now."""
        if self._stop is not None:
            self._say(f"{why}abandoned what was not committed yet; run the same command again to continue")
        end_soon(self.exit_code)
        if self._abandon is None:
            raise KeyboardInterrupt
        self._abandon()


def _in_loop(act: Callable[[], None]) -> Callable[[], None]:
    token = trio.lowlevel.current_trio_token()

    def later() -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(act)

    return later


def _pace(pipeline: Pipeline, producer: AsyncProducer) -> str:
    """The cause of most waiting, and the steps ahead of the slowest group, as the end of a line."""
    bottleneck, running = pipeline.bottleneck(producer.held_s), producer.running
    ahead = running.lead.steps_ahead(running.loop.head)
    return (f"; bottleneck {bottleneck}" if bottleneck else "") + (f"; lead {ahead} steps" if ahead is not None else "")


async def run_plan(
    place: LocatedPlan,
    options: RunOptions,
    stopping: Stopping,
    *,
    say: Callable[[str], None],
    progress: Progress = show_nothing,
) -> RunResult:
    """Run to the end of the plan, the limit or a signal; everything appended is committed then.

    `say` gets lines for people: warnings, a store that does not answer, and the bad records that may explain an error.
    `KeyboardInterrupt` if a signal came before the first step or after the last one, or a second SIGINT between them.
    """
    session = _RunSession(place, options, stopping, say, progress)
    with trio.CancelScope() as abandon:
        stopping.notify(abandon.cancel)
        return await session.run()
    raise KeyboardInterrupt


@dataclass(slots=True)
class _RunSession:
    place: LocatedPlan
    options: RunOptions
    stopping: Stopping
    say: Callable[[str], None]
    progress: Progress
    workers_max: int = 1
    bottleneck: Bottleneck | None = None
    silence: Silence = field(init=False)
    outage: Outage = field(default_factory=Outage)
    begun_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.silence = Silence(self.say)

    async def run(self) -> RunResult:
        options = self.options
        prepared = await looked_up(self.place)  # before a lake is created on behalf of a mistake
        encoder_for(prepared.payloads)  # or torch is missing
        async with (
            self._store() as store,
            open_engine(options, self.place.directory, prepared, self.say) as (engine, most),
        ):
            self.workers_max = most
            self._memory_of(prepared)
            identity = await ensure_lake(store, grid_of(self.place.plan), self.place.plan.output.ext)
            # Before the producer is opened, which would fence a healthy run.
            look = partial(refuse_unfit, store, identity, self.place, options=options)
            position, sealed = await look(prepared, say=self.say)
            fit = partial(fit_plan, store, identity, self.place, prepared, accept_changes=options.accept_changes)
            prepared = await fit(position, say=self.say)
            if options.accept_changes and position is not None and read_position(position).plan != prepared.digest:
                self.say(await where_it_begins(store, identity))
            await keep_plan(store, identity, self.place, prepared)
            await engine.admit(node_check(self._as_worked(prepared), identity, options))
            if sealed:
                return await self._nothing_to_do(engine, identity, prepared, position)
            async with self._scraped() as registry, self._producer(store, self._memory_of(prepared)) as producer:
                self.silence.set_limit(GIVE_UP_AFTER_S)
                if producer.position != position:  # another run committed meanwhile
                    prepared = await fit(producer.position)
                    await keep_plan(store, identity, self.place, prepared)
                await look(prepared, say=lambda _: None)  # others may have begun meanwhile
                totals = totals_from(producer.position, prepared.rules)
                incarnation = (identity.lake_id, prepared.digest, options.producer_id, Epoch(producer.epoch))
                await keep_libraries(store, *incarnation)
                with bad_records_named(totals, self.say):
                    pipeline, ending = await self._run_pipeline(producer, engine, prepared, totals, store, registry)
            sealed = options.seal and ending is EndReason.COMPLETE
            if sealed:
                await seal(await LogReader.open(store, identity), SystemClock())
        return self._result(identity, prepared, totals, ending, pipeline.reason, sealed=sealed)

    async def _nothing_to_do(
        self, engine: Engine, identity: LakeIdentity, prepared: PreparedPlan, position: object
    ) -> RunResult:
        """The result of a command that is repeated after it has sealed the lake; `SealedError` if the plan has more steps."""

        def refuse(*_: object) -> None:
            raise sealed_error(self.options.lake)

        if position is None:
            refuse()
        totals = totals_from(position, prepared.rules)
        pipeline = Pipeline(self._config(engine, prepared), engine, None, callbacks_of(prepared, totals, refuse))
        with self.stopping.between_steps(pipeline.stop):
            ending = await pipeline.run(totals.start)
        return self._result(identity, prepared, totals, ending, pipeline.reason, sealed=True)

    def _result(
        self,
        identity: LakeIdentity,
        prepared: PreparedPlan,
        totals: PlanTotals,
        ending: EndReason,
        reason: str,
        *,
        sealed: bool,
    ) -> RunResult:
        return RunResult(
            lake=self.options.lake,
            lake_id=identity.lake_id,
            producer_id=self.options.producer_id,
            plan=prepared.digest,
            totals=totals,
            ending=ending,
            reason=reason,
            bottleneck=self.bottleneck,
            seconds=time.monotonic() - self.begun_s,
            sealed=sealed,
        )

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[Store]:
        store = open_store(self.options.lake, options=self.options.store_options, silence=self.silence)
        try:
            yield store
        finally:
            with trio.CancelScope(shield=True):
                await store.aclose()

    def _memory_of(self, prepared: PreparedPlan) -> Memory:
        given = self.options.memory
        return memory_of(given, prepared.rules, prepared.sources, self.workers_max)

    def _as_worked(self, prepared: PreparedPlan) -> tuple[LoadedSource, ...]:
        if self.options.engine == "local":
            return prepared.sources
        return as_nodes_see(prepared.sources, self.place.directory)

    def _producer(self, store: Store, memory: Memory) -> AsyncProducer:
        producer = AsyncProducer(
            self.options.lake,
            producer_id=self.options.producer_id,
            store=store,
            max_lead=self.options.max_lead or None,
            max_live_bytes=self.options.max_live_bytes,
            max_lead_without_groups=False,
            max_pending_bytes=memory.pending_bytes,
        )
        producer.outage = self.outage  # its steps and its commits tell of one
        return producer

    def _config(self, engine: Engine, prepared: PreparedPlan) -> RunConfig:
        options, memory = self.options, self._memory_of(prepared)
        return RunConfig(
            prepared.rules,
            self._as_worked(prepared),
            prepared.payloads,
            steps_max=options.limit_steps,
            steps_per_second=options.steps_per_second,
            held_bytes_max=memory.held_bytes,
            rows_bytes_max=memory.pending_bytes,
            workers_max=self.workers_max if self.workers_max > engine.workers else None,
            outage=self.outage,
        )

    async def _run_pipeline(
        self,
        producer: AsyncProducer,
        engine: Engine,
        prepared: PreparedPlan,
        totals: PlanTotals,
        store: Store,
        registry: CollectorRegistry | None,
    ) -> tuple[Pipeline, EndReason]:
        """Feed the producer to the end; everything appended is committed then."""
        options, rules = self.options, prepared.rules
        config, memory = self._config(engine, prepared), self._memory_of(prepared)
        with self.progress(options.producer_id, options.limit_steps or rules.steps_max) as show:
            async with trio.open_nursery() as nursery:
                at = (options.lake, options.store_options, producer.lake)
                to = Destination(*at, options.producer_id, Epoch(producer.epoch))
                sink = StepSink(producer, put_step, to)
                pipeline = Pipeline(config, engine, sink, callbacks_of(prepared, totals, show))
                nursery.start_soon(notice_silence, store, lambda: totals.steps)
                nursery.start_soon(self._lose_patience)
                nursery.start_soon(say_edits, self.place, self.say)
                if registry is not None:
                    info = {"lake": options.lake, "producer": options.producer_id, "plan": prepared.digest}
                    from stepfs_producer.run.metrics import PlanMetrics  # noqa: PLC0415

                    registry.register(PlanMetrics(info, totals, pipeline, engine, memory.total))
                totals.pace = partial(_pace, pipeline, producer)
                with self.stopping.between_steps(pipeline.stop):
                    ending = await pipeline.run(totals.start)
                self.bottleneck = pipeline.bottleneck(producer.held_s)
                nursery.cancel_scope.cancel()
        return pipeline, ending

    async def _lose_patience(self) -> None:
        """Abandon what cannot be committed after a signal."""
        answered_s = trio.current_time()
        while trio.current_time() - answered_s < PATIENCE_S:
            if not self.stopping.requested or not (self.outage.goes_on or self.silence.silent_s > PATIENCE_S):
                answered_s = trio.current_time()
            await trio.sleep(PATIENCE_S / 10)
        self.stopping.abandon(f"the store did not answer for {PATIENCE_S:g} s: ")

    @asynccontextmanager
    async def _scraped(self) -> AsyncIterator[CollectorRegistry | None]:
        """Take the metrics port, before anybody is fenced by a run that cannot have it."""
        options = self.options
        if options.metrics_port is None:
            yield None
            return
        from prometheus_client import CollectorRegistry  # noqa: PLC0415  (a web server, which few runs need)

        from stepfs._internal import scrape  # noqa: PLC0415

        registry = CollectorRegistry()
        address, healthy = options.metrics_address, scrape.loop_turns()
        with scrape.served(options.metrics_port, registry, address=address, healthy=healthy):
            yield registry
