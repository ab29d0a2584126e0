"""What a run loads ahead, what that takes, and what it waits for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import trio
from declared import changed, column_spec, transform_spec
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs_producer.commit.uploads import Ticket
from stepfs_producer.engine.retry import TaskRunner
from stepfs_producer.plan.step import State
from stepfs_producer.run import read_ahead
from stepfs_producer.run.bottleneck import Bottleneck, Cause, Waits, bottleneck_of
from stepfs_producer.run.memory import COPIES, StepRoom
from stepfs_producer.run.pipeline import PlannerTask
from stepfs_producer.run.workers.tasks import transform
from stepfs_producer.run.workers.upload import put_step


class MeetingEngine(HereEngine):
    """Transforms wait until two of them are under way."""

    def __init__(self) -> None:
        super().__init__(0)
        self._begun = 0
        self._two = trio.Event()

    async def submit(self, function: Callable, *arguments: object) -> object:
        if function is transform:
            self._begun += 1
            if self._begun == 2:
                self._two.set()
            await self._two.wait()
        return await super().submit(function, *arguments)


@pytest.mark.timeout(20)
async def test_two_blocks_of_one_group_each_are_transformed_side_by_side(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(read_ahead, "GROUP_RECORDS_FIRST", 1000)  # a block is one group
    write_corpus(tmp_path, "code", 200)
    producer = NotedProducer()
    chosen = rules({"code": 1}, micro_batch_tokens=512)
    with trio.fail_after(10):
        await run(MeetingEngine(), producer, chosen, sources_in(tmp_path, {"code": 1}), steps_max=2)
    assert len(producer.steps) == 2


class HangingEngine(HereEngine):
    """The transforms of one source hang for a while."""

    def __init__(self, source: str, seconds: float) -> None:
        super().__init__(0, workers=4)
        self._source, self._seconds = source, seconds

    async def submit(self, function: Callable, *arguments: object) -> object:
        if function is transform and self._source in arguments:
            await trio.sleep(self._seconds)
        return await super().submit(function, *arguments)


@pytest.mark.logs("no step can be planned")
@pytest.mark.parametrize(("seconds", "told"), [(50, set()), (200, {"prose"})])
async def test_a_source_that_hangs_is_named_with_what_it_does(tmp_path, patient_clock, caplog, seconds, told):
    for name in ("code", "prose"):
        write_corpus(tmp_path, name, 40)
    weights = {"code": 1, "prose": 1}
    producer = NotedProducer()
    await run(HangingEngine("prose", seconds), producer, rules(weights), sources_in(tmp_path, weights), steps_max=1)
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert {line.split(":")[0].removeprefix("source ") for line in lines} == told
    assert all("still transforming records" in line and "of block (" in line for line in lines)


ROW_BYTES = 50_000
PIXELS = column_spec("pixels", "uint8", (ROW_BYTES,))
STEPS = 30
RULES = rules({"pictures": 1}, micro_batch_tokens=64, columns=("pixels",))


def sample(record):
    return {"text": record["text"], "columns": {"pixels": np.full((record["rows"], ROW_BYTES), 7, np.uint8)}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    directory.joinpath("pictures").mkdir()
    records = [{"text": "x" * (20 + number % 40), "rows": number % 5} for number in range(300)]
    (directory / "pictures" / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return directory


class Measured(HereEngine):
    """Notes the most bytes of rows that were in steps being made, and the most steps with rows."""

    def __init__(self, **options) -> None:
        super().__init__(3, workers=8, **options)
        self.making: list[int] = []
        self.row_bytes_most = self.kept_bytes_most = 0
        self.steps_most = 0  # with rows

    async def submit(self, function, *arguments):
        if function is not put_step:
            return await super().submit(function, *arguments)
        size = int(arguments[1].rows.sum()) * ROW_BYTES
        self.making.append(size)
        self.row_bytes_most = max(self.row_bytes_most, sum(self.making))
        self.steps_most = max(self.steps_most, sum(map(bool, self.making)))
        self.kept_bytes_most = max(self.kept_bytes_most, sum(body.nbytes for body in self.kept))
        for _ in range(100):  # longer than the planner takes for as many steps as there is room for
            await trio.lowlevel.checkpoint()
        try:
            return await super().submit(function, *arguments)
        finally:
            self.making.remove(size)


async def made(corpus, *, deaths: float = 0.0, **bounds: int) -> tuple[Measured, list]:
    engine, producer = Measured(deaths=deaths), NotedProducer()
    [plain] = sources_in(corpus, {"pictures": 1})
    spec = changed(plain.spec, whole_records=True)
    transform = transform_spec(plain.transform.tokenizer, f"{__name__}:sample", (PIXELS,))
    source = replace(plain, spec=spec, transform=transform, layout=replace_spec(plain.layout, spec))
    with trio.fail_after(120):
        await run(
            engine, producer, RULES, (source,), steps_max=STEPS, columns=(PIXELS,), ext=".safetensors", **bounds,
        )  # fmt: skip
    assert len(producer.steps) == STEPS
    return engine, producer.steps


def replace_spec(layout, spec):
    return type(layout)(spec, layout.listing)


async def test_rows_of_steps_under_way_stay_within_their_bytes(corpus) -> None:
    free, expected = await made(corpus)
    bound = 3_000_000
    assert COPIES * free.row_bytes_most > 2 * bound, "without a bound there are more"
    engine, steps = await made(corpus, rows_bytes_max=bound, held_bytes_max=bound, deaths=0.1)
    assert steps == expected
    assert COPIES * engine.row_bytes_most <= bound
    assert engine.steps_most > 1, "several steps fit"
    assert engine.kept_bytes_most < free.kept_bytes_most


@pytest.mark.logs("made one by one")
async def test_steps_that_are_larger_than_all_are_made_one_by_one_and_it_is_said_once(corpus, caplog) -> None:
    engine, steps = await made(corpus, rows_bytes_max=1000, held_bytes_max=1000)
    assert engine.steps_most == 1
    assert steps == (await made(corpus))[1]
    [line] = [record.getMessage() for record in caplog.records]
    assert "--memory leaves 0 MiB" in line
    assert "Give more --memory" in line


async def test_a_large_step_waits_for_all_before_it_and_small_ones_behind_it_go_on(autojump_clock) -> None:
    room, taken = StepRoom(3, COPIES * 100), []

    async def take() -> None:
        for size in (10, 100, 0, 0, 60, 40, 1):
            await room.take(size)
            taken.append(size)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        for given, expected in ((10, [10]), (100, [100, 0, 0]), (0, [60]), (0, [40]), (40, []), (60, [1])):
            await trio.testing.wait_all_tasks_blocked()
            assert taken == expected
            taken.clear()
            room.give(given)


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
    pipeline, _ = await run(
        engine, producer or NotedProducer(), chosen, sources_in(tmp_path, MIX), steps_max=12, **more
    )
    found = pipeline.bottleneck(held_s)
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
        rules(MIX),
        cast("dict", dict.fromkeys(MIX)),
        tasks=cast("TaskRunner", HeldBy({"prose": 3.0, "": 1.0})),
        waits=waits,
    )
    monkeypatch.setattr(task, "_planner", SimpleNamespace(next=lambda *_: time.sleep(0.05)))  # for a core
    await task._planned(State("p", 0, {}), {})
    assert waits.seconds[Cause.PLANNER, ""] == pytest.approx(0.001)
    assert waits.seconds[Cause.SOURCE, "prose"] == pytest.approx(3 * waits.seconds[Cause.ROOM, ""])
    assert waits.seconds[Cause.SOURCE, "prose"] > 0.03
