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
from stepfs.lake.log.append import seal as append_seal
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
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.state import read_position
from stepfs_producer.plan.step import StepPlan
from stepfs_producer.run.conductor import Conductor, Ending, Running, Watching
from stepfs_producer.run.loading import find_modules_in, preload
from stepfs_producer.run.memory import Memory, memory_of
from stepfs_producer.run.starting import Started, plan_at, start
from stepfs_producer.run.totals import BadRecord, PlanTotals
from stepfs_producer.settings import GIVE_UP_AFTER_S


@dataclass(frozen=True, slots=True)
class PlanRun:
    """The command line, parsed."""

    plan: Path
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


def run_plan(run: PlanRun) -> int:
    """Run to the end of the plan, the limit or a signal; the exit code."""
    with Stopping() as stopping:
        summary = trio.run(partial(_run, run, stopping))
    for bad in summary.totals.bad[:10]:
        say(
            f"stepfs-produce: skipped: source {printable(bad.source)}, {printable(bad.file)} at {bad.offset}: "
            f"{printable(bad.reason)}"
        )
    if summary.skip_log is not None:
        say(f"stepfs-produce: all skipped records are listed in {run.lake}, object {summary.skip_log}")
    typer.echo(summary.as_json() if run.as_json else summary.as_line())
    return stopping.exit_code if summary.ending is Ending.STOPPED else 0


async def _run(run: PlanRun, stopping: Stopping) -> PlanSummary:
    begun_s = time.monotonic()
    workers = run.workers or len(os.sched_getaffinity(0))
    place = plan_at(run.plan, held_out=run.held_out)
    find_modules_in(place.directory)
    output = place.plan.output
    identity = await ensure_lake(
        run.lake, output.mesh.slices, output.ext, run.store_options, check_ext=lambda _ext: None
    )
    # Before the producer is opened, which would fence a healthy run on behalf of a mistake.
    positions = await committed_positions(run.lake, run.store_options)
    silence = Silence(announce)
    store = open_store(run.lake, options=run.store_options, silence=silence)
    try:
        fit = partial(start, store, identity, place)
        started = await fit(positions.get(run.producer_id), accept_changes=run.accept_changes)
        memory = memory_of(run.memory_bytes, started.compiled.rules, started.sources, workers)
        async with AsyncProducer(
            run.lake,
            producer_id=run.producer_id,
            store=store,
            max_lead=run.max_lead,
            max_lead_without_groups=False,
            max_pending_bytes=memory.pending_bytes,
        ) as producer:
            silence.set_limit(GIVE_UP_AFTER_S)
            if producer.position != positions.get(run.producer_id):  # another run committed meanwhile
                started = await fit(producer.position, accept_changes=run.accept_changes)
            totals = _totals_of(producer, started)
            key = skips_key(identity.lake_id, started.digest, run.producer_id, Epoch(producer.epoch))
            skip_log = SkipLog(store, key, totals)
            ending, reason = await _conduct(
                run, stopping, producer, started, memory, workers, totals, skip_log
            )
            logged = await skip_log.write()
        sealed = run.seal and ending is Ending.COMPLETE
        if sealed:
            async with opened_log(run.lake, run.store_options) as log:
                await append_seal(log, SystemClock())
    finally:
        with trio.CancelScope(shield=True):
            await store.aclose()
    return PlanSummary(
        skip_log=logged,
        lake=run.lake,
        lake_id=identity.lake_id,
        producer_id=run.producer_id,
        plan=started.digest,
        totals=totals,
        ending=ending,
        reason=reason,
        seconds=time.monotonic() - begun_s,
        sealed=sealed,
    )


def _totals_of(producer: AsyncProducer, started: Started) -> PlanTotals:
    """From where the lake is."""
    stored = None if producer.position is None else read_position(producer.position)
    state = Planner(started.compiled.rules).begin(stored)
    return PlanTotals(state, state)


async def _conduct(
    run: PlanRun,
    stopping: Stopping,
    producer: AsyncProducer,
    started: Started,
    memory: Memory,
    workers: int,
    totals: PlanTotals,
    skip_log: SkipLog,
) -> tuple[Ending, str]:
    """Feed the producer until something ends it; everything appended is committed then."""
    rules = started.compiled.rules
    running = Running(
        rules,
        started.sources,
        started.payloads,
        steps_max=run.limit_steps,
        steps_per_second=run.steps_per_second,
        held_bytes_max=memory.held_bytes,
        give_up_after_s=GIVE_UP_AFTER_S,
    )

    def skipped(source: str, file: int, offset: int, reason: str) -> None:
        totals.note_bad(BadRecord(source, started.listings[source].files[file].name, offset, reason))

    with showing_plan(run.producer_id, run.limit_steps or rules.steps_max) as show:

        def appended(plan: StepPlan, planning_s: float) -> None:
            totals.note(plan, planning_s)
            show(totals, {name: loading.held.tokens for name, loading in conductor.loadings.items()})

        async with local_engine(workers, preload=partial(preload, str(run.plan.parent))) as engine:
            conductor = Conductor(running, engine, producer, Watching(skipped, appended))
            _stop_by_signal(stopping, conductor)
            metrics = PlanMetrics(_info(run, started), totals, conductor.loadings, engine)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(skip_log.run)
                with _scraped(run, metrics):
                    ending = await conductor.run(totals.start)
                nursery.cancel_scope.cancel()
    return ending, conductor.reason


def _info(run: PlanRun, started: Started) -> dict[str, str]:
    return {"lake": run.lake, "producer": run.producer_id, "plan": started.digest}


def _scraped(run: PlanRun, metrics: PlanMetrics) -> AbstractContextManager[None]:
    if run.metrics_port is None:
        return nullcontext()
    return scrape.served(
        run.metrics_port, registry_of(metrics), address=run.metrics_address, healthy=scrape.loop_turns()
    )


def _stop_by_signal(stopping: Stopping, conductor: Conductor) -> None:
    """The first signal ends the run between two steps, a second SIGINT at once."""
    token = trio.lowlevel.current_trio_token()

    def told(abandoned: bool) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(conductor.abandon if abandoned else conductor.stop)

    stopping.tell(told)
    if stopping.requested:  # while the run was starting
        conductor.stop()
