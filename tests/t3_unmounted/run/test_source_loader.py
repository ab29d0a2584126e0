"""Loading keeps workers busy: groups of the next block are under way before the last group of a block is done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs_producer.run import measured
from stepfs_producer.run.workers.tasks import transform


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
    monkeypatch.setattr(measured, "GROUP_RECORDS_FIRST", 1000)  # a block is one group
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
