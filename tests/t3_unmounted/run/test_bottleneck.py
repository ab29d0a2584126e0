"""What a run waited for is named: the source, the workers, the pace, the store or the trainers, whichever it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs_producer.commit.uploads import Ticket
from stepfs_producer.engine.tasks import TaskRunner
from stepfs_producer.plan.step import State
from stepfs_producer.run.conductor import PlannerTask
from stepfs_producer.run.measured import Bottleneck, Cause, Waits, bottleneck_of
from stepfs_producer.run.workers.tasks import transform
from stepfs_producer.run.workers.upload import put_step

MIX = {"code": 50, "prose": 50}


class SlowEngine(HereEngine):
    """Tasks of one kind take a while: transforms of a source, or the construction of steps."""

    def __init__(self, kind: Callable[..., object], source: str, seconds: float) -> None:
        super().__init__(0, workers=2)
        self._kind, self._source, self._seconds = kind, source, seconds

    async def submit(self, function: Callable, *arguments: object) -> object:
        slow = function is self._kind and (not self._source or self._source in arguments)
        if slow:
            await trio.sleep(self._seconds)
        answer = await super().submit(function, *arguments)
        if slow and function is transform:
            head, body = answer
            return replace(head, seconds=self._seconds), body
        return answer


class SlowProducer(NotedProducer):
    async def reserve(self, **more) -> Ticket:
        await trio.sleep(2)
        return await super().reserve(**more)


async def bottleneck(tmp_path, engine, producer=None, *, held_s=0.0, **more) -> Bottleneck:
    for name in MIX:
        write_corpus(tmp_path, name, 300)
    chosen = rules(MIX, micro_batch_tokens=256)
    conductor, _ = await run(
        engine, producer or NotedProducer(), chosen, sources_in(tmp_path, MIX), steps_max=12, **more
    )
    found = conductor.bottleneck(held_s)
    assert found is not None
    return found


async def test_a_slow_source_is_named(tmp_path, patient_clock) -> None:
    found = await bottleneck(tmp_path, SlowEngine(transform, "prose", 4))
    assert (found.cause, found.source, found.workers) == (Cause.SOURCE, "prose", 2)
    assert str(found) == f"prose ({found.workers_wanted:.1f} of 2 workers wanted)"
    assert 0.4 < found.workers_wanted <= 2 / 0.8


async def test_the_workers_that_a_pace_would_take(tmp_path, patient_clock) -> None:
    found = await bottleneck(tmp_path, SlowEngine(put_step, "", 4), steps_per_second=2)
    assert found.cause is Cause.WORKERS
    assert 4 * 2 / 0.8 <= found.workers_wanted < 5 * 2 / 0.8, "each step takes four seconds of a worker"


async def test_workers_that_make_steps(tmp_path, patient_clock) -> None:
    found = await bottleneck(tmp_path, SlowEngine(put_step, "", 4))
    assert found.cause is Cause.WORKERS
    assert 2 < found.workers_wanted <= 2 / 0.8, "both worked nearly all of the time"


@pytest.mark.parametrize(("held_s", "cause"), [(0.0, Cause.STORE), (20.0, Cause.TRAINERS)])
async def test_appends_that_wait(tmp_path, patient_clock, held_s, cause) -> None:
    found = await bottleneck(tmp_path, HereEngine(0), SlowProducer(), held_s=held_s)
    assert (found.cause, found.source) == (cause, "")
    assert found.document()["source"] is None


async def test_a_pace_that_was_asked_for(tmp_path, patient_clock) -> None:
    found = await bottleneck(tmp_path, HereEngine(0), steps_per_second=0.5)
    assert found.cause is Cause.PACE


@pytest.mark.parametrize(
    ("worked_s", "blamed"),
    [
        ({"code": 0.5, "prose": 7.0, "": 9.0}, {(Cause.SOURCE, "code"): 4.0}),
        ({"prose": 3.0, "": 1.0}, {(Cause.SOURCE, "prose"): 3.0, (Cause.ROOM, ""): 1.0}),
        ({}, {(Cause.SOURCE, "code"): 2.0, (Cause.SOURCE, "web"): 2.0}),
    ],
)
async def test_a_source_that_lacks_a_worker_is_not_blamed(autojump_clock, worked_s, blamed) -> None:
    waits, held_s = Waits(), {"prose": 5.0}
    with waits.on_sources(["code", "web"], held_s.copy):
        await trio.sleep(4)
        held_s.update({name: held_s.get(name, 0.0) + seconds for name, seconds in worked_s.items()})
    assert {key: seconds for key, seconds in waits.seconds.items() if seconds} == pytest.approx(blamed)


def test_the_planner_and_nothing() -> None:
    waits = Waits()
    named = partial(bottleneck_of, waits, held_s=0.0, work_s=1.0, elapsed_s=2.0, workers=4)
    assert named() is None
    waits.note(Cause.SOURCE, 1.0, "code")
    waits.note(Cause.PLANNER, 1.5)
    waits.note(Cause.WORKERS, 9.0)  # for a step that was not planned yet
    assert named() == Bottleneck(Cause.PLANNER, "", 0.625, 4)


def test_workers_that_spend_most_of_their_time_on_one_source_are_that_source() -> None:
    waits = Waits()
    waits.note(Cause.ROOM, 8.0)
    waits.note(Cause.WORKERS, 7.0)
    named = partial(bottleneck_of, waits, held_s=0.0, work_s=8.2, elapsed_s=4.1, workers=2)
    found = named(worked_s={"prose": 7.8, "code": 0.1, "": 0.3})
    assert found is not None
    assert (found.cause, found.source) == (Cause.SOURCE, "prose")
    for even in ({"prose": 4.0, "code": 4.0, "": 0.2}, {"": 8.0, "prose": 0.2}, {}):
        assert named(worked_s=even) == replace(found, cause=Cause.WORKERS, source="")


class HeldBy:
    """Tasks that hold workers so long by the second look."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = [{}, seconds]

    def held_s(self) -> dict[str, float]:
        return self._seconds.pop(0)


async def test_a_planner_that_waits_for_a_core_is_not_blamed(tmp_path, monkeypatch) -> None:
    """Its thread's CPU time is planning; the rest belongs to those whose tasks hold the workers meanwhile."""
    told = [0.0]

    def thread_time() -> float:
        told[0] += 0.001
        return told[0]

    monkeypatch.setattr("time.thread_time", thread_time)
    waits = Waits()
    task = PlannerTask(
        rules(MIX), cast("dict", dict.fromkeys(MIX)), tasks=cast("TaskRunner", HeldBy({"prose": 3.0, "": 1.0})), waits=waits
    )
    monkeypatch.setattr(task, "_planner", SimpleNamespace(next=lambda *_: time.sleep(0.05)))  # for a core
    await task._planned(State("p", 0, {}), {})
    assert waits.seconds[Cause.PLANNER, ""] == pytest.approx(0.001)
    assert waits.seconds[Cause.SOURCE, "prose"] == pytest.approx(3 * waits.seconds[Cause.ROOM, ""])
    assert waits.seconds[Cause.SOURCE, "prose"] > 0.03
