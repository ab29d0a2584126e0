"""Hazards of a running plan, each with a run that has it: P5, P15 bodies let go or lost before their step is durable, P6
errors that pass, P16 a transform that is no function.

A mutant must change steps or end the run; the honest run beside it must not.
"""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from random import Random

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs.errors import RefusedError, StoreUnreachableError, UsageError
from stepfs.format.tgb import Descriptor
from stepfs_producer.engine import retry as failover
from stepfs_producer.engine.api import Lost, WorkerDied
from stepfs_producer.engine.retry import KeptBody
from stepfs_producer.payloads.step import PayloadSpec
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.rules import SourceRule
from stepfs_producer.plan.sources import SkipBudget
from stepfs_producer.plan.step import State, read_position
from stepfs_producer.run import load, pipeline
from stepfs_producer.run.memory import STEPS_PER_WORKER
from stepfs_producer.run.pipeline import EndReason, Pipeline, RunCallbacks, RunConfig
from stepfs_producer.run.workers.tasks import read, transform
from stepfs_producer.run.workers.upload import put_step
from stepfs_producer.sources.record import BlockTask, SourceSpec

MIX = {"code": 30, "prose": 70}
RULES = rules(MIX, micro_batch_tokens=256)
STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory, "code", 150)
    write_corpus(directory, "prose", 350)
    return directory


async def steps(engine: HereEngine, corpus, **more) -> list:
    producer = NotedProducer()
    await run(engine, producer, RULES, sources_in(corpus, MIX), steps_max=STEPS, **more)
    return producer.steps


class DyingConstructors(HereEngine):
    """Every step costs two constructors; by then the planner is steps ahead."""

    def __init__(self, *, losses: float = 0.0) -> None:
        super().__init__(1, workers=4, losses=losses)
        self.died: Counter[bytes] = Counter()
        self.done: Counter[tuple] = Counter()  # reads and transforms

    async def submit(self, function, *arguments):
        result = await super().submit(function, *arguments)
        if isinstance(result, Lost):
            return result
        if function is put_step and self.died[arguments[1].spans.tobytes()] < 2:
            self.died[arguments[1].spans.tobytes()] += 1
            return WorkerDied("killed")
        if function is read:
            self.done[arguments[0].name, *arguments[1].place] += 1
        elif function is transform:
            _, _, epoch, name, block, first, last = arguments
            self.done[name, epoch, pickle.loads(block.body).data.values.tobytes(), first, last] += 1
        return result


async def test_a_step_is_made_again_from_the_bodies_that_were_let_go(corpus) -> None:
    engine = DyingConstructors()
    assert await steps(engine, corpus) == await steps(HereEngine(0, workers=1), corpus)
    assert engine.died.total() == 2 * STEPS
    assert set(engine.done.values()) == {1}, "all that a step needs is held until it is durable"


async def test_bodies_let_go_before_their_step_is_durable_are_noticed(corpus, monkeypatch) -> None:
    """P5: the planner lets go of them, and the step in the making does not hold them. They have to be made again."""
    monkeypatch.setattr(pipeline, "_bodies", lambda _groups: [])
    engine = DyingConstructors()
    assert await steps(engine, corpus) == await steps(HereEngine(0, workers=1), corpus)
    assert max(engine.done.values()) > 1


async def test_lost_bodies_are_made_again_and_do_not_show(corpus) -> None:
    """P15, and deaths beside it."""
    engine = DyingConstructors(losses=0.2)
    assert await steps(engine, corpus) == await steps(HereEngine(0, workers=1), corpus)
    assert engine.lost > 10
    assert max(engine.done.values()) > 1


async def test_a_lost_body_that_is_not_noted_is_noticed(corpus, monkeypatch) -> None:
    """P15: the task is given to another worker with the reference that is lost."""
    monkeypatch.setattr(KeptBody, "note_lost", lambda _self, _references: False)
    engine = DyingConstructors(losses=0.2)
    with pytest.raises(ExceptionGroup) as caught:
        await steps(engine, corpus)
    assert caught.group_contains(AssertionError, match="was told that it is lost")


_calls = itertools.count(1)


def lengthening(*arguments):
    """P16: every call gives one token more."""
    head, body = transform(*arguments)
    tokens = head.heads.tokens + next(_calls)
    ids = Ragged(np.zeros(tokens.sum(), np.int32), np.cumsum(tokens))
    return replace(head, heads=replace(head.heads, tokens=tokens)), replace(body, ids=ids)


async def test_a_lost_body_whose_transform_gives_another_result_ends_the_run(corpus, monkeypatch) -> None:
    monkeypatch.setattr(load, "transform", lengthening)
    with pytest.raises(ExceptionGroup) as caught:
        await steps(HereEngine(3, losses=0.3), corpus)
    assert caught.group_contains(RefusedError, match="done again, it has another result")


class PassingErrors(HereEngine):
    """The file system or the store fails the first read, whose records every run needs, and some of the others."""

    def __init__(self, seed: int, error: Exception) -> None:
        super().__init__(seed)
        self.error = error
        self.failed = 0
        self._draw = Random(seed)

    async def submit(self, function, *arguments):
        if function in {read, sloppy_read} and (not self.failed or self._draw.random() < 0.3):
            self.failed += 1
            arguments = (function, arguments, self.error)
            function = failing
        return await super().submit(function, *arguments)


def failing(function, arguments, error: Exception):
    if function is sloppy_read:
        return sloppy_read(*arguments, error=error)
    raise error


def sloppy_read(spec: SourceSpec, task: BlockTask, error: Exception | None = None):
    """P6: records that cannot be read this time are bad ones."""
    head, records = read(spec, task)
    bad = {} if error is None else dict.fromkeys(range(len(records)), str(error))
    return head, replace(records, bad=bad)


ERRORS = [OSError(5, "Input/output error"), StoreUnreachableError("no answer")]


@pytest.mark.logs("trying on for")
@pytest.mark.parametrize("error", ERRORS, ids=["disk", "store"])
async def test_an_error_that_passes_costs_no_record(corpus, error, patient_clock) -> None:
    engine = PassingErrors(2, error)
    assert await steps(engine, corpus) == await steps(HereEngine(0), corpus)
    assert engine.failed


async def test_a_reader_that_takes_it_for_bad_records_is_noticed(corpus, monkeypatch) -> None:
    monkeypatch.setattr(load, "read", sloppy_read)
    budget = SkipBudget(Fraction(1), 10_000)
    lenient = rules(MIX, micro_batch_tokens=256, sources={name: SourceRule("i", "l", skips=budget) for name in MIX})
    engine = PassingErrors(2, ERRORS[0])
    producer = NotedProducer()
    await run(engine, producer, lenient, sources_in(corpus, MIX), steps_max=STEPS)
    assert engine.failed
    assert producer.steps != await steps(HereEngine(0), corpus)


async def test_restarts_at_every_step_do_not_forgive_bad_records(tmp_path) -> None:
    """P8, with real positions: the budget ends the plan at the step at which it ends without a restart."""
    write_corpus(tmp_path, "code", 300, bad=range(0, 300, 9))
    chosen = rules(
        {"code": 1},
        micro_batch_tokens=256,
        sources={"code": SourceRule("i", "l", skips=SkipBudget(Fraction(1, 100), 5))},
    )
    sources = sources_in(tmp_path, {"code": 1}, epochs=1)
    whole = NotedProducer()
    with pytest.raises(ExceptionGroup):
        await run(HereEngine(1), whole, chosen, sources)
    parted = NotedProducer()
    state: State = Planner(chosen).begin()
    with pytest.raises(ExceptionGroup):
        while True:
            position = parted.steps[-1][1] if parted.steps else None
            await run(HereEngine(2), parted, chosen, sources, position=position, steps_max=state.step + 1)
            state = read_position(parted.steps[-1][1])
    assert parted.steps[: len(whole.steps)] == whole.steps
    assert 1 <= state.sources["code"].skipped <= 10


class LosingConstructors(HereEngine):
    """Some constructors die after their upload, and one may be lost thrice but not more."""

    def __init__(self, seed: int, share: float, **more) -> None:
        super().__init__(seed, **more)
        self.share = share
        self.keys: list[str] = []
        self._draw = Random(seed)
        self._lost: dict[bytes, int] = {}

    async def submit(self, function, *arguments):
        result = await super().submit(function, *arguments)
        if function is not put_step or not isinstance(result, Descriptor):
            return result
        self.keys.append(arguments[3].key)
        step = pickle.dumps(arguments[1].spans)
        if self._draw.random() < self.share and self._lost.get(step, 0) < 2:
            self._lost[step] = self._lost.get(step, 0) + 1
            return WorkerDied("killed")
        return result


async def expected(corpus) -> list:
    producer = NotedProducer()
    await run(HereEngine(0, workers=1), producer, RULES, sources_in(corpus, MIX), steps_max=STEPS)
    return producer.steps


@cache
def steps_of_one(corpus):
    return trio.run(expected, corpus)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.booleans(), st.sampled_from([0, 0.3]), st.sampled_from([0, 0.2]))
def test_steps_are_those_of_one_worker(corpus, tmp_path_factory, seed, workers, late, share, losses):
    tickets = NotedProducer(tmp_path_factory.mktemp("lake"))
    engine = LosingConstructors(seed, share, workers=workers, losses=losses)

    async def uploaded() -> list:
        await run(engine, tickets, RULES, sources_in(corpus, MIX), steps_max=STEPS)
        assert tickets.flushed == STEPS
        return tickets.steps

    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(failover, "LATE_S_MIN", 0)
            patch.setattr(failover, "LATE_TIMES_MEAN", 0)
        assert trio.run(uploaded) == steps_of_one(corpus)
    assert len(set(engine.keys)) == len(engine.keys), "no two constructors have one key"
    assert len(list(tickets.root.rglob("*.tgb"))) == len(engine.keys) >= STEPS


async def test_a_stop_leaves_no_step_that_was_not_settled_in_the_totals(corpus, tmp_path) -> None:
    tickets, told = NotedProducer(tmp_path), []

    def appended(plan, *_) -> None:
        told.append(plan.step)
        if plan.step == 4:
            running.stop()

    config = RunConfig(RULES, sources_in(corpus, MIX), PayloadSpec(".npy", True, 257, 258))
    running = Pipeline(config, HereEngine(4), tickets.sink(), RunCallbacks(appended=appended))
    assert await running.run(Planner(RULES).begin()) is EndReason.STOPPED
    assert told == list(range(len(told)))
    settled = [seq for seq in range(len(tickets.reserved)) if seq in tickets.settled]
    certain = next((seq for seq in range(len(settled)) if settled[seq] != seq), len(settled))
    assert len(told) == certain >= 5
    assert (await expected(corpus))[:certain] == tickets.steps[:certain]


async def test_a_producer_that_waits_stops_the_planner(corpus, tmp_path, patient_clock) -> None:
    tickets, planned = NotedProducer(tmp_path, most=3), []
    config = RunConfig(RULES, sources_in(corpus, MIX), PayloadSpec(".npy", True, 257, 258), steps_max=STEPS)
    engine = HereEngine(0, workers=1)
    running = Pipeline(
        config, engine, tickets.sink(), RunCallbacks(appended=lambda plan, *_: planned.append(plan.step))
    )
    with trio.move_on_after(5):
        await running.run(Planner(RULES).begin())
    assert planned == [0, 1, 2]
    assert len(tickets.settled) == 3
    assert running.loaders["code"].held.groups, "samples stay for the steps that wait"
    assert STEPS_PER_WORKER == 2


@pytest.mark.parametrize(
    ("lake", "why"), [({"slices": 3}, "a step of 2 files"), ({"ext": ".tar"}, "payload 0 .*--check-payload")]
)
async def test_a_step_that_breaks_the_lakes_promises_is_refused_in_the_worker(corpus, tmp_path, lake, why):
    tickets = NotedProducer(tmp_path)
    with pytest.raises(ExceptionGroup) as caught:
        await run(HereEngine(1), tickets, RULES, sources_in(corpus, MIX), steps_max=1, sink=tickets.sink(**lake))
    assert caught.group_contains(UsageError, match=why)
    assert not list(tmp_path.rglob("*.tgb"))
