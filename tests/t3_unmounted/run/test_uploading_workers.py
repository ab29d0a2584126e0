"""Steps that workers upload under tickets: the same bytes, whoever dies, is late or is lost."""

from __future__ import annotations

import pickle
from random import Random

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs.errors import UsageError
from stepfs.format.tgb import Descriptor
from stepfs_producer.engine import tasks as failover
from stepfs_producer.engine.tasks import WorkerDied
from stepfs_producer.payloads.step import PayloadSpec
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.step import read_position
from stepfs_producer.run.conductor import Conductor, EndReason, RunCallbacks, RunConfig
from stepfs_producer.run.memory import STEPS_PER_WORKER
from stepfs_producer.run.workers.upload import put_step

MIX = {"code": 30, "prose": 70}
RULES = rules(MIX, micro_batch_tokens=256)
STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory, "code", 150)
    write_corpus(directory, "prose", 350)
    return directory


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
        assert trio.run(uploaded) == trio.run(expected, corpus)
    assert len(set(engine.keys)) == len(engine.keys), "no two constructors have one key"
    assert len(list(tickets.root.rglob("*.tgb"))) == len(engine.keys) >= STEPS


async def test_a_stop_leaves_no_step_that_was_not_settled_in_the_totals(corpus, tmp_path) -> None:
    tickets, told = NotedProducer(tmp_path), []

    def appended(plan, *_) -> None:
        told.append(plan.step)
        if plan.step == 4:
            conductor.stop()

    config = RunConfig(RULES, sources_in(corpus, MIX), PayloadSpec(".npy", True, 257, 258))
    conductor = Conductor(config, HereEngine(4), tickets.sink(), RunCallbacks(appended=appended))
    assert await conductor.run(Planner(RULES).begin()) is EndReason.STOPPED
    assert told == list(range(len(told)))
    settled = [seq for seq in range(len(tickets.reserved)) if seq in tickets.settled]
    certain = next((seq for seq in range(len(settled)) if settled[seq] != seq), len(settled))
    assert len(told) == certain >= 5
    assert (await expected(corpus))[:certain] == tickets.steps[:certain]


async def test_a_run_goes_on_from_the_last_step_that_was_certain(corpus, tmp_path) -> None:
    whole = await expected(corpus)
    tickets = NotedProducer(tmp_path)
    position = read_position(whole[4][1]).position()
    await run(HereEngine(1), tickets, RULES, sources_in(corpus, MIX), steps_max=STEPS, position=position)
    assert tickets.steps == whole[5:]


async def test_a_producer_that_waits_stops_the_planner(corpus, tmp_path, patient_clock) -> None:
    tickets, planned = NotedProducer(tmp_path, most=3), []
    config = RunConfig(RULES, sources_in(corpus, MIX), PayloadSpec(".npy", True, 257, 258), steps_max=STEPS)
    engine = HereEngine(0, workers=1)
    conductor = Conductor(
        config, engine, tickets.sink(), RunCallbacks(appended=lambda plan, *_: planned.append(plan.step))
    )
    with trio.move_on_after(5):
        await conductor.run(Planner(RULES).begin())
    assert planned == [0, 1, 2]
    assert len(tickets.settled) == 3
    assert conductor.loaders["code"].held.groups, "samples stay for the steps that wait"
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
