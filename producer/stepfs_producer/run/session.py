"""One run of a plan into a lake: check everything that can be wrong, then open the producer and conduct the plan.

Also a simulation: the same plan over the same records, without a lake.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial

import trio

from stepfs.clock import SystemClock
from stepfs.format.ids import Epoch
from stepfs.format.keys import skips_key
from stepfs.format.records import LakeIdentity
from stepfs.lake.identity import payload_schema
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs.store.silence import Silence
from stepfs_producer.engine.api import Engine
from stepfs_producer.payloads.described import planned_schema, refuse_other_arrays
from stepfs_producer.payloads.encode import encoder_for
from stepfs_producer.plan.file.digest import micro_batch_tokens
from stepfs_producer.producer import AsyncProducer
from stepfs_producer.run.compile import grid_of
from stepfs_producer.run.conductor import Conductor, EndReason, RunConfig
from stepfs_producer.run.lake import committed_positions, ensure_lake, keep_libraries, notice_silence
from stepfs_producer.run.machines.needs import look_of
from stepfs_producer.run.machines.opening import as_nodes_see, open_engine
from stepfs_producer.run.measured.bottleneck import Bottleneck
from stepfs_producer.run.memory.bounds import Memory, memory_of
from stepfs_producer.run.options import RunOptions
from stepfs_producer.run.prepare import (
    LocatedPlan,
    PreparedPlan,
    fit_plan,
    looked_up,
    refuse_other_shards,
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
from stepfs_producer.run.skip_log import SkipLog
from stepfs_producer.run.source_loader import LoadedSource
from stepfs_producer.run.step_builder import ByTicket
from stepfs_producer.run.stopping import Stopping
from stepfs_producer.run.workers.upload import Destination
from stepfs_producer.settings import GIVE_UP_AFTER_S


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
    `KeyboardInterrupt` if a second SIGINT abandoned it.
    """
    session = _RunSession(place, options, stopping, say, progress)
    with trio.CancelScope() as abandon:
        stopping.notify(session.stop, abandon.cancel)
        return await session.run()
    raise KeyboardInterrupt


class _RunSession:
    def __init__(
        self,
        place: LocatedPlan,
        options: RunOptions,
        stopping: Stopping,
        say: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._place = place
        self._options = options
        self._stopping = stopping
        self._workers_max = 1
        self._say = say
        self._progress = progress
        self._silence = Silence(say)
        self._conductor: Conductor | None = None
        self._bottleneck: Bottleneck | None = None
        self._begun_s = time.monotonic()

    def stop(self) -> None:
        """End between two steps."""
        if self._conductor is not None:
            self._conductor.stop()

    async def run(self) -> RunResult:
        options = self._options
        prepared = await looked_up(self._place)  # before a lake is created on behalf of a mistake
        encoder_for(prepared.payloads.ext, vocabulary=prepared.payloads.vocabulary)  # or torch is missing
        async with (
            self._store() as store,
            open_engine(options, self._place.directory, prepared, self._say) as (engine, most),
        ):
            self._workers_max = most
            self._memory_of(prepared)
            identity = await self._lake(store, prepared)
            # Before the producer is opened, which would fence a healthy run.
            position = await self._position(store, identity, prepared)
            accept, listings = options.accept_changes, prepared.listings
            fit = partial(fit_plan, store, identity, self._place, listings, accept_changes=accept)
            prepared = await fit(position)
            await engine.admit(look_of(self._as_worked(prepared), identity.lake_id, options))
            async with self._producer(store, self._memory_of(prepared)) as producer:
                self._silence.set_limit(GIVE_UP_AFTER_S)
                if producer.position != position:  # another run committed meanwhile
                    prepared = await fit(producer.position)
                await self._position(store, identity, prepared)  # others may have begun meanwhile
                totals = totals_from(producer.position, prepared.rules)
                incarnation = (identity.lake_id, prepared.digest, options.producer_id, Epoch(producer.epoch))
                key = skips_key(*incarnation)
                await keep_libraries(store, *incarnation)
                skip_log = SkipLog(store, key, totals)
                with bad_records_named(totals, self._say):
                    conductor, ending = await self._conduct(producer, engine, prepared, totals, skip_log)
                logged = await skip_log.write()
            sealed = options.seal and ending is EndReason.COMPLETE
            if sealed:
                await seal(await LogReader.open(store, identity), SystemClock())
        return RunResult(
            lake=options.lake,
            lake_id=identity.lake_id,
            producer_id=options.producer_id,
            plan=prepared.digest,
            totals=totals,
            ending=ending,
            reason=conductor.reason,
            bottleneck=self._bottleneck,
            seconds=time.monotonic() - self._begun_s,
            sealed=sealed,
            skip_log=logged,
        )

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[Store]:
        store = open_store(self._options.lake, options=self._options.store_options, silence=self._silence)
        try:
            yield store
        finally:
            with trio.CancelScope(shield=True):
                await store.aclose()

    async def _lake(self, store: Store, prepared: PreparedPlan) -> LakeIdentity:
        plan = self._place.plan
        output = plan.output
        fixed = self._options.fixed_shape
        micro = 1 if output.files == "micro_batches" else output.micro_batches if fixed else "micro"
        schema = planned_schema(
            output.ext,
            prepared.tokenizer,
            vocabulary=prepared.payloads.vocabulary,
            shape=(micro, micro_batch_tokens(plan) if fixed else "tokens"),
            columns=prepared.payloads.columns,
        )
        identity = await ensure_lake(store, grid_of(plan), output.ext, schema)
        warning = refuse_other_arrays(
            self._options.lake, schema, payload_schema(identity, self._options.lake)
        )
        if warning is not None:
            self._say(f"warning: {warning}")
        return identity

    async def _position(self, store: Store, identity: LakeIdentity, prepared: PreparedPlan) -> object:
        """Where this producer id is, None if it has not begun; then no other one may have other shards of its files."""
        positions = committed_positions(await LogReader.open(store, identity))
        mine = positions.get(self._options.producer_id)
        if mine is None:
            await refuse_other_shards(store, identity, prepared, positions)
        return mine

    def _memory_of(self, prepared: PreparedPlan) -> Memory:
        given = self._options.memory_bytes
        return memory_of(given, prepared.rules, prepared.sources, self._workers_max)

    def _as_worked(self, prepared: PreparedPlan) -> tuple[LoadedSource, ...]:
        if self._options.engine == "local":
            return prepared.sources
        return as_nodes_see(prepared.sources, self._place.directory)

    def _producer(self, store: Store, memory: Memory) -> AsyncProducer:
        return AsyncProducer(
            self._options.lake,
            producer_id=self._options.producer_id,
            store=store,
            max_lead=self._options.max_lead or None,
            max_live_bytes=self._options.max_live_bytes,
            max_lead_without_groups=False,
            max_pending_bytes=memory.pending_bytes,
        )

    async def _conduct(
        self,
        producer: AsyncProducer,
        engine: Engine,
        prepared: PreparedPlan,
        totals: PlanTotals,
        skip_log: SkipLog,
    ) -> tuple[Conductor, EndReason]:
        """Feed the producer to the end; everything appended is committed then."""
        options, rules, memory = self._options, prepared.rules, self._memory_of(prepared)
        config = RunConfig(
            rules,
            self._as_worked(prepared),
            prepared.payloads,
            steps_max=options.limit_steps,
            steps_per_second=options.steps_per_second,
            held_bytes_max=memory.held_bytes,
            rows_bytes_max=memory.pending_bytes,
            give_up_after_s=GIVE_UP_AFTER_S,
            workers_max=self._workers_max if self._workers_max > engine.workers else None,
        )
        with self._progress(options.producer_id, options.limit_steps or rules.steps_max) as show:
            async with trio.open_nursery() as nursery:
                at = (options.lake, options.store_options, producer.lake)
                to = Destination(*at, options.producer_id, Epoch(producer.epoch))
                self._conductor = conductor = Conductor(
                    config, engine, ByTicket(producer, to), callbacks_of(prepared, totals, show)
                )
                if self._stopping.requested:  # it may have come already
                    conductor.stop()
                nursery.start_soon(skip_log.run)
                nursery.start_soon(notice_silence, skip_log.store, lambda: totals.steps)
                with self._scraped(prepared, totals, conductor, engine):
                    ending = await conductor.run(totals.start)
                self._bottleneck = conductor.bottleneck(producer.held_s)
                nursery.cancel_scope.cancel()
        return conductor, ending

    def _scraped(
        self, prepared: PreparedPlan, totals: PlanTotals, conductor: Conductor, engine: Engine
    ) -> AbstractContextManager[None]:
        options = self._options
        if options.metrics_port is None:
            return nullcontext()
        from stepfs import scrape  # noqa: PLC0415  (a web server, which few runs need)
        from stepfs_producer.run.metrics import PlanMetrics, registry_of  # noqa: PLC0415

        info = {"lake": options.lake, "producer": options.producer_id, "plan": prepared.digest}
        metrics = PlanMetrics(info, totals, conductor, engine, self._memory_of(prepared).total)
        return scrape.served(
            options.metrics_port,
            registry_of(metrics),
            address=options.metrics_address,
            healthy=scrape.loop_turns(),
        )
