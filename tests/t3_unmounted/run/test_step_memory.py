"""The memory of steps under way: rows of their columns are counted, whatever the images; no step waits for ever."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import trio
from planned_run import HereEngine, NotedProducer, rules, run, sources_in

from stepfs_producer.payloads.step import ColumnSpec
from stepfs_producer.run.memory import COPIES, StepRoom
from stepfs_producer.run.workers.upload import put_step
from stepfs_producer.transforms.documents import TransformSpec

ROW_BYTES = 50_000
PIXELS = ColumnSpec("pixels", "uint8", (ROW_BYTES,))
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
    spec = replace(plain.spec, whole_records=True)
    transform = TransformSpec(plain.transform.tokenizer, f"{__name__}:sample", (PIXELS,))
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
