"""A run of a plan: the steps do not depend on who worked when, and every record is in exactly one of them."""

from __future__ import annotations

import io
import os
import re
import signal
from collections import Counter
from fractions import Fraction
from functools import partial
from random import Random

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs.errors import RefusedError, StepfsError
from stepfs_producer.commit.uploads import Ticket
from stepfs_producer.engine import tasks as failover
from stepfs_producer.engine.local import local_engine
from stepfs_producer.payloads.step import PayloadSpec
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Exhausted, Packing, SourceRule
from stepfs_producer.plan.samples import SkipBudget
from stepfs_producer.plan.step import StepPlan
from stepfs_producer.run import conductor, measured
from stepfs_producer.run.conductor import Conductor, EndReason, RunCallbacks, RunConfig
from stepfs_producer.run.measured import WorkersWanted
from stepfs_producer.run.memory import STEPS_PER_WORKER

MIX = {"code": 30, "prose": 70}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory, "code", 150)
    write_corpus(directory, "prose", 350)
    return directory


async def steps(engine: HereEngine, corpus, chosen, *, steps_max=12, position=None):
    producer = NotedProducer()
    await run(engine, producer, chosen, sources_in(corpus, MIX), steps_max=steps_max, position=position)
    assert producer.flushed == len(producer.steps)
    return producer.steps


@pytest.mark.parametrize("packing", Packing)
async def test_steps_are_the_same_whoever_worked_when(corpus, packing, monkeypatch) -> None:
    chosen = rules(MIX, packing=packing, micro_batch_tokens=256)
    expected = await steps(HereEngine(0, workers=1), corpus, chosen)
    assert len(expected) == 12
    for seed in range(1, 6):
        monkeypatch.setattr(measured, "GROUP_RECORDS_FIRST", seed * 5)
        assert await steps(HereEngine(seed, workers=seed, deaths=0.1), corpus, chosen) == expected


class ResizedEngine(HereEngine):
    """Notes how many workers it was told to have."""

    def __init__(self, seed: int) -> None:
        self.told: set[object] = set()
        super().__init__(seed, deaths=0.1)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "workers":
            self.told.add(value)


async def test_a_number_of_workers_that_changes_does_not_show(corpus, monkeypatch) -> None:
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0, workers=1), corpus, chosen)
    draw = Random(7)
    monkeypatch.setattr(conductor, "LOOK_EVERY_S", 1e-6)
    monkeypatch.setattr(WorkersWanted, "next", lambda *_: draw.randint(1, 6))
    engine, producer = ResizedEngine(1), NotedProducer()
    sources = sources_in(corpus, MIX)
    await run(engine, producer, chosen, sources, steps_max=12, workers_max=6)
    assert producer.steps == expected
    assert engine.told == set(range(1, 7))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 3), st.sampled_from([0, 0.02, 0.2]))
def test_marks_groups_late_answers_and_lost_bodies_do_not_show(corpus, seed, workers, spares, losses) -> None:
    """P2: each is drawn anew at every chance, and with spares every task that has not answered at once is late."""
    draw = Random(seed)
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = trio.run(steps, HereEngine(0, workers=1), corpus, chosen)
    engine = HereEngine(seed, workers=workers, deaths=0.1, losses=losses)
    engine.spares = max(spares, 1)

    def any_marks(coming, _works, most):
        return [(draw.choice([1, tokens, 9 * tokens + 1]), draw.randint(1, most + 1)) for tokens in coming]

    def any_group(self, *_measured) -> None:
        self.group_records = draw.choice([1, 2, 3, 7, 40])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conductor, "marks_of", any_marks)
        patch.setattr(measured.Work, "note", any_group)
        if spares:
            patch.setattr(failover, "LATE_S_MIN", 0)
            patch.setattr(failover, "LATE_TIMES_MEAN", 0)
        assert trio.run(steps, engine, corpus, chosen) == expected
    assert bool(engine.replaced) == bool(spares), "tasks were late, and one of two workers came second"
    assert losses < 0.2 or engine.lost


async def test_processes_of_this_machine_that_are_killed_make_the_same_steps(corpus) -> None:
    """P2: any engine; Ray's is compared in `t5_cli/test_ray.py`."""
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0, workers=1), corpus, chosen)
    async with local_engine(2) as engine, trio.open_nursery() as nursery:

        async def kill() -> None:
            while not engine.died:  # an idle one is replaced, and not counted
                pid = await engine.submit(os.getpid)
                assert isinstance(pid, int)
                os.kill(pid, signal.SIGKILL)
                await engine.submit(os.getpid)

        nursery.start_soon(kill)
        while not engine.died:  # a run may be over before the first kill
            assert await steps(engine, corpus, chosen) == expected
        nursery.cancel_scope.cancel()


async def test_a_run_continues_from_any_position(corpus) -> None:
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0), corpus, chosen)
    for done in (1, 5, 11):
        again = await steps(HereEngine(done), corpus, chosen, position=expected[done - 1][1])
        assert again == expected[done:]


async def test_every_record_is_in_exactly_one_step(corpus) -> None:
    chosen = rules(MIX, micro_batch_tokens=512, length=512, exhausted=Exhausted.ALL, pad_last=True)
    producer = NotedProducer()
    engine = HereEngine(3, deaths=0.1, losses=0.1)
    conductor, ending = await run(engine, producer, chosen, sources_in(corpus, MIX, epochs=1))
    assert ending is EndReason.COMPLETE
    assert not engine.kept, "all is let go when its last step is made"
    assert "exhausted" in conductor.reason
    found: Counter[str] = Counter()
    for payloads, _, _ in producer.steps:
        for payload in payloads:
            ids = np.load(io.BytesIO(payload))[0]
            text = "".join(chr(one) if one < 256 else "\n" for one in ids.reshape(-1).tolist())
            found.update(re.findall(r"(\w+ \d+) x*\n", text))
    assert found == Counter(
        f"{name} {number}" for name, count in (("code", 150), ("prose", 350)) for number in range(count)
    )


async def test_a_stop_ends_between_two_steps(corpus) -> None:
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0), corpus, chosen)
    producer = NotedProducer()
    engine = HereEngine(4)

    def appended(plan, _seconds, _held) -> None:
        if plan.step == 4:
            stop()

    running = RunConfig(chosen, sources_in(corpus, MIX), PayloadSpec(".npy", True, 257, 258))
    conductor = Conductor(running, engine, producer.sink(), RunCallbacks(appended=appended))
    stop = conductor.stop
    assert await conductor.run(Planner(chosen).begin()) is EndReason.STOPPED
    assert 5 <= len(producer.steps) == producer.flushed
    assert producer.steps == expected[: len(producer.steps)]


class FullLake(NotedProducer):
    """Gives no ticket before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.takes = trio.Event()

    async def reserve(self, **more) -> Ticket:
        await self.takes.wait()
        return await super().reserve(**more)


async def test_the_next_step_is_planned_while_there_is_no_room_for_it(corpus, patient_clock, monkeypatch):
    workers, planned = 1, []
    honest = Planner.next

    def noted(self, state, ahead):
        found = honest(self, state, ahead)
        planned.extend([state.step] if isinstance(found, StepPlan) else [])
        return found

    monkeypatch.setattr(Planner, "next", noted)
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0), corpus, chosen)
    planned.clear()
    lake = FullLake()
    async with trio.open_nursery() as nursery:
        engine = HereEngine(0, workers=workers)
        nursery.start_soon(partial(run, engine, lake, chosen, sources_in(corpus, MIX), steps_max=12))
        await trio.sleep(1)  # of the test's clock: nothing moves any more
        assert planned == list(range(STEPS_PER_WORKER * workers + 1))
        lake.takes.set()
    assert lake.steps == expected


async def test_bad_records_are_told_and_counted(tmp_path) -> None:
    write_corpus(tmp_path, "code", 40, bad=(3, 30))
    told = []
    chosen = rules(
        {"code": 1},
        micro_batch_tokens=512,
        length=512,
        pad_last=True,
        sources={"code": SourceRule("i", "l", skips=SkipBudget(Fraction(1, 10), 5))},
    )
    producer = NotedProducer()
    await run(
        HereEngine(1), producer, chosen, sources_in(tmp_path, {"code": 1}, epochs=1),
        watching=RunCallbacks(skipped=lambda *one: told.append(one)),
    )  # fmt: skip
    assert [(source, file) for source, file, _, _ in sorted(told)] == [("code", 0), ("code", 1)]
    assert all(reason for *_, reason in told)


async def test_the_first_bad_record_stops_a_plan_that_allows_none(tmp_path) -> None:
    write_corpus(tmp_path, "code", 40, bad=(3,))
    chosen = rules({"code": 1}, micro_batch_tokens=512, length=512)
    with pytest.raises(ExceptionGroup) as caught:
        await run(HereEngine(1), NotedProducer(), chosen, sources_in(tmp_path, {"code": 1}, epochs=1))
    assert caught.group_contains(RefusedError, match="could not be decoded")


async def test_a_task_that_kills_three_workers_stops_the_run(corpus) -> None:
    chosen = rules(MIX, micro_batch_tokens=256)
    with pytest.raises(ExceptionGroup) as caught:
        await run(HereEngine(1, deaths=1.0), NotedProducer(), chosen, sources_in(corpus, MIX))
    assert caught.group_contains(StepfsError, match="workers died of it")


@pytest.mark.timeout(20)
async def test_a_source_that_gives_nothing_for_a_whole_epoch_ends_the_run(tmp_path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.jsonl").write_text('{"text": ""}\n' * 40)
    chosen = rules({"code": 1}, micro_batch_tokens=512, length=512)
    with pytest.raises(ExceptionGroup) as caught:
        await run(HereEngine(1), NotedProducer(), chosen, sources_in(tmp_path, {"code": 1}))
    assert caught.group_contains(RefusedError, match="a whole epoch of it gave no sample")
