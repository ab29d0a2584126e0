"""The hazard of COMMIT.md that concerns pacing: batching that never flushes; and what a producer says of its pace."""

from __future__ import annotations

import pytest
import trio
from producer_world import World, append, feed, simulate
from scenarios import scenario

from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit.loop import CommitLoop
from stepfs_producer.commit.pace import Pacer


async def hazard_09(world: World, others: int) -> float:
    """That many contenders in view, the longest jitter, and one record: how long until it can be read?"""
    async with world.producer("p", max_delay=3.0) as producer:
        await append(producer, 0)
        await producer.flush()
        pacer = producer._pacer
        pacer._draw = lambda _low, high: high
        pacer.others = others
        for _ in range(9):
            pacer.won(started_s=trio.current_time(), exposure_s=0.02)
        appended_s = trio.current_time()
        await append(producer, 1)
        await producer.flush()
        return trio.current_time() - appended_s


def test_hazard_09_adaptive_batching_flushes_within_its_bound() -> None:
    assert 2.0 < simulate(lambda world: hazard_09(world, 29)) < 3.1


def test_hazard_09_a_bound_shorter_than_the_pace_becomes_the_pace() -> None:
    assert 15.0 < simulate(lambda world: hazard_09(world, 150)) < 15.0 * 1.15 + 0.5


@pytest.mark.logs("move it nearer to the store")
def test_a_producer_that_loses_all_the_time_says_so_once(monkeypatch, caplog):
    async def scenario(world: World) -> None:
        async with trio.open_nursery() as nursery:
            for who in "abcdefgh":
                nursery.start_soon(one, world, who)

    async def one(world: World, who: str) -> None:
        async with world.producer(who) as producer:
            await feed(producer, 20, pause_s=0.3)

    simulate(scenario)
    assert "move it nearer" not in caplog.text, "losing now and then is usual"
    monkeypatch.setattr(commit_loop, "LOSSES_WORTH_SAYING", 1)
    simulate(scenario)
    told = [record.args[0] for record in caplog.records if "move it nearer" in record.msg]
    assert 0 < len(told) == len(set(told))


def test_hazard_09_mutant_that_only_adapts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pacer, "gives_way", True)
    with monkeypatch.context() as silent:
        silent.setattr(CommitLoop, "_say_if_giving_way", lambda _loop: None)
        assert simulate(lambda world: hazard_09(world, 29)) > 3.1


@pytest.mark.logs("raise max_delay")
@scenario(simulate)
async def test_hazard_09_a_bound_that_gives_way_to_the_pacing_is_said_once(world: World, caplog):
    async def other(world: World, who: str) -> None:
        async with world.producer(who) as producer:
            await feed(producer, 1)

    async with world.producer("p", max_delay=0.0) as producer:
        await append(producer, 0)
        await producer.flush()
        async with trio.open_nursery() as nursery:
            for who in "abcdefgh":
                nursery.start_soon(other, world, who)
        for number in range(1, 4):
            await append(producer, number)
            await producer.flush()
        assert producer.pacing.gives_way
        assert producer.pacing.others == 8
    assert sum(str(record.args).startswith("('p',") for record in caplog.records) == 1
