"""One run of `stepfs-produce run`: check everything that can be wrong, then open the producer and conduct the plan."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio
import typer

from stepfs import scrape
from stepfs.cli.columns import printable
from stepfs.cli.failure import announce, say
from stepfs.cli.target import opened_log
from stepfs.clock import SystemClock
from stepfs.format.ids import Epoch
from stepfs.format.keys import skips_key
from stepfs.lake.identity import payload_schema
from stepfs.lake.log.append import seal as append_seal
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs.store.options import StoreOptions
from stepfs.store.silence import Silence
from stepfs_producer import AsyncProducer
from stepfs_producer.cli.ensure_lake import committed_positions, ensure_lake
from stepfs_producer.cli.plans.plan_metrics import PlanMetrics, registry_of
from stepfs_producer.cli.plans.plan_summary import PlanSummary, showing_plan
from stepfs_producer.cli.plans.skip_log import SkipLog
from stepfs_producer.cli.stopping import Stopping
from stepfs_producer.engine.local import local_engine
from stepfs_producer.payloads.described import planned_schema, refuse_other_arrays
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.state import read_position
from stepfs_producer.plan.step import StepPlan
from stepfs_producer.roles.preload import find_modules_in, preload
from stepfs_producer.run.conductor import Conductor, EndReason, RunCallbacks, RunConfig
from stepfs_producer.run.memory import Memory, memory_of
from stepfs_producer.run.prepare import (
    LocatedPlan,
    PreparedPlan,
    fit_plan,
    list_sources,
    plan_at,
    prepare_plan,
)
from stepfs_producer.run.totals import BadRecord, PlanTotals
from stepfs_producer.settings import GIVE_UP_AFTER_S


@dataclass(frozen=True, slots=True)
class PlanRun:
    """The command line, parsed."""

    plan: Path | LocatedPlan
    lake: str
    producer_id: str
    accept_changes: bool
    workers: int | None
    memory_bytes: int | None
    max_lead: int | None
    limit_steps: int | None
    steps_per_second: float | None
    held_out: bool
    seal: bool
    store_options: StoreOptions
    metrics_port: int | None
    metrics_address: str
    as_json: bool

    @property
    def directory(self) -> str:
        """Where the user's own modules are."""
        return self.plan.directory if isinstance(self.plan, LocatedPlan) else str(self.plan.parent)


def run_plan(run: PlanRun) -> int:
    """Run to the end of the plan, the limit or a signal; the exit code."""
    with Stopping() as stopping:
        summary = trio.run(partial(conducted, run, stopping))
    _say_bad(summary.totals, "skipped")
    if summary.skip_log is not None:
        say(f"stepfs-produce: all skipped records are listed in {run.lake}, object {summary.skip_log}")
    typer.echo(summary.as_json() if run.as_json else summary.as_line())
    return stopping.exit_code if summary.ending is EndReason.STOPPED else 0


def _say_bad(totals: PlanTotals, what: str) -> None:
    for bad in totals.bad[:10]:
        say(
            f"stepfs-produce: {what}: source {printable(bad.source)}, {printable(bad.file)} at {bad.offset}: "
            f"{printable(bad.reason)}"
        )


async def conducted(run: PlanRun, stopping: Stopping) -> PlanSummary:
    """Run until something ends it; `KeyboardInterrupt` if a second SIGINT abandoned it."""
    with trio.CancelScope() as scope:
        commanded = _Commanded(run, _StopsBySignal(stopping, scope))
        return await commanded.run()
    raise KeyboardInterrupt


class _StopsBySignal:
    """The first signal ends the conductor between two steps, a second SIGINT everything at once."""

    def __init__(self, stopping: Stopping, scope: trio.CancelScope) -> None:
        self._stopping = stopping
        self._scope = scope
        self._conductor: Conductor | None = None
        token = trio.lowlevel.current_trio_token()

        def told(abandoned: bool) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._scope.cancel if abandoned else self._stop)

        stopping.tell(told)

    def conducts(self, conductor: Conductor) -> None:
        """From now on the first signal is for `conductor`; it may have come already."""
        self._conductor = conductor
        if self._stopping.requested:
            conductor.stop()

    def _stop(self) -> None:
        if self._conductor is not None:
            self._conductor.stop()


class _Commanded:
    """One command line, carried out."""

    def __init__(self, run: PlanRun, stops: _StopsBySignal) -> None:
        self._run = run
        self._stops = stops
        self._workers = run.workers or len(os.sched_getaffinity(0))
        self._begun_s = time.monotonic()

    async def run(self) -> PlanSummary:
        """Check, open, conduct, seal."""
        run = self._run
        place = run.plan if isinstance(run.plan, LocatedPlan) else plan_at(run.plan, held_out=run.held_out)
        find_modules_in(place.directory)
        files = await list_sources(place)
        # Before a lake is created on behalf of a mistake.
        checked = await trio.to_thread.run_sync(prepare_plan, place, files)
        self._memory_of(checked)
        schema = planned_schema(
            place.plan.output.ext, checked.tokenizer, vocabulary=checked.payloads.vocabulary
        )
        output = place.plan.output
        identity = await ensure_lake(
            run.lake,
            output.mesh.slices,
            output.ext,
            run.store_options,
            check_ext=lambda _ext: None,
            schema=lambda _ext: schema,
            advice=(
                "name another lake, or set output.mesh to one with dp =",
                "name another lake, or set output.ext to",
            ),
        )
        # Before the producer is opened, which would fence a healthy run.
        warning = refuse_other_arrays(run.lake, schema, payload_schema(identity, run.lake))
        if warning is not None:
            say(f"stepfs-produce: warning: {printable(warning)}")
        positions = await committed_positions(run.lake, run.store_options)
        silence = Silence(announce)
        store = open_store(run.lake, options=run.store_options, silence=silence)
        try:
            fit = partial(fit_plan, store, identity, place, files, accept_changes=run.accept_changes)
            ready = await fit(positions.get(run.producer_id))
            async with self._producer(store, self._memory_of(ready)) as producer:
                silence.set_limit(GIVE_UP_AFTER_S)
                if producer.position != positions.get(run.producer_id):  # another run committed meanwhile
                    ready = await fit(producer.position)
                totals = _totals_of(producer, ready)
                key = skips_key(identity.lake_id, ready.digest, run.producer_id, Epoch(producer.epoch))
                skip_log = SkipLog(store, key, totals)
                try:
                    ending, reason = await self._conduct(producer, ready, totals, skip_log)
                except Exception:
                    _say_bad(totals, "bad record")  # it may be the reason
                    raise
                logged = await skip_log.write()
        finally:
            with trio.CancelScope(shield=True):
                await store.aclose()
        return PlanSummary(
            lake=run.lake,
            lake_id=identity.lake_id,
            producer_id=run.producer_id,
            plan=ready.digest,
            totals=totals,
            ending=ending,
            reason=reason,
            sealed=await self._sealed(ending),
            skip_log=logged,
            seconds=time.monotonic() - self._begun_s,
        )

    def _memory_of(self, ready: PreparedPlan) -> Memory:
        return memory_of(self._run.memory_bytes, ready.compiled.rules, ready.sources, self._workers)

    def _producer(self, store: Store, memory: Memory) -> AsyncProducer:
        return AsyncProducer(
            self._run.lake,
            producer_id=self._run.producer_id,
            store=store,
            max_lead=self._run.max_lead,
            max_lead_without_groups=False,
            max_pending_bytes=memory.pending_bytes,
        )

    async def _sealed(self, ending: EndReason) -> bool:
        if not self._run.seal or ending is not EndReason.COMPLETE:
            return False
        async with opened_log(self._run.lake, self._run.store_options) as log:
            await append_seal(log, SystemClock())
        return True

    async def _conduct(
        self, producer: AsyncProducer, ready: PreparedPlan, totals: PlanTotals, skip_log: SkipLog
    ) -> tuple[EndReason, str]:
        """Feed the producer until something ends it; everything appended is committed then."""
        run, rules = self._run, ready.compiled.rules
        running = RunConfig(
            rules,
            ready.sources,
            ready.payloads,
            steps_max=run.limit_steps,
            steps_per_second=run.steps_per_second,
            held_bytes_max=self._memory_of(ready).held_bytes,
            give_up_after_s=GIVE_UP_AFTER_S,
        )

        def skipped(source: str, file: int, offset: int, reason: str) -> None:
            totals.note_bad(BadRecord(source, ready.listings[source].files[file].name, offset, reason))

        with showing_plan(run.producer_id, run.limit_steps or rules.steps_max) as show:

            def appended(plan: StepPlan, planning_s: float) -> None:
                totals.note(plan, planning_s)
                show(totals, {name: loading.held.tokens for name, loading in conductor.loadings.items()})

            async with (
                local_engine(self._workers, preload=partial(preload, run.directory)) as engine,
                trio.open_nursery() as nursery,
            ):
                conductor = Conductor(running, engine, producer, RunCallbacks(skipped, appended))
                self._stops.conducts(conductor)
                nursery.start_soon(skip_log.run)
                info = {"lake": run.lake, "producer": run.producer_id, "plan": ready.digest}
                with _scraped(run, PlanMetrics(info, totals, conductor.loadings, engine)):
                    ending = await conductor.run(totals.start)
                nursery.cancel_scope.cancel()
        return ending, conductor.reason


def _totals_of(producer: AsyncProducer, ready: PreparedPlan) -> PlanTotals:
    """From where the lake is."""
    stored = None if producer.position is None else read_position(producer.position)
    state = Planner(ready.compiled.rules).begin(stored)
    return PlanTotals(state, state)


def _scraped(run: PlanRun, metrics: PlanMetrics) -> AbstractContextManager[None]:
    if run.metrics_port is None:
        return nullcontext()
    return scrape.served(
        run.metrics_port, registry_of(metrics), address=run.metrics_address, healthy=scrape.loop_turns()
    )
