"""Loading keeps workers busy: groups of the next block are under way before the last group of a block is done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs_producer.run import loading


class MeetingEngine(HereEngine):
    """Transforms wait until two of them are under way."""

    def __init__(self) -> None:
        super().__init__(0)
        self._begun = 0
        self._two = trio.Event()

    async def submit(self, function: Callable, *arguments: object) -> object:
        if function is loading.timed_transform:
            self._begun += 1
            if self._begun == 2:
                self._two.set()
            await self._two.wait()
        return await super().submit(function, *arguments)


@pytest.mark.timeout(20)
async def test_two_blocks_of_one_group_each_are_transformed_side_by_side(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loading, "GROUP_RECORDS_MIN", 1000)  # a block is one group
    write_corpus(tmp_path, "code", 200)
    producer = NotedProducer()
    chosen = rules({"code": 1}, micro_batch_tokens=512)
    with trio.fail_after(10):
        await run(MeetingEngine(), producer, chosen, sources_in(tmp_path, {"code": 1}), steps_max=2)
    assert len(producer.steps) == 2
