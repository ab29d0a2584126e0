"""A lake that can take no more says so to its writers, and stays what it was to everybody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doubles.trio_clock import TrioClock
from lakework import reclaim
from producer_world import World, append, feed, simulate
from scenarios import scenario

from stepfs.errors import RefusedError, StepfsError
from stepfs.format.commit import Commit
from stepfs.format.ids import Step
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.snapshot import LogState, decode_snapshot, encode_snapshot
from stepfs.lake.control import Group
from stepfs.lake.log.reader import LogReader
from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit import rebase

POSITION_BYTES = 1000


async def read(world: World) -> LogState:
    return (await LogReader.open(world.store("reader"), world.identity)).state


async def publish(world: World, who: str, *positions: object) -> None:
    async with world.producer(who) as producer:
        for position in positions:
            await producer.append([b"a", b"b"], position=position)


@scenario(simulate)
async def test_a_lake_whose_totals_are_full_refuses_appends_and_stays_readable(world: World, monkeypatch):
    await publish(world, "a", 1, 2, 3)
    before = await read(world)
    monkeypatch.setattr(rebase, "TOTAL_MAX", before.total_bytes + 1)
    with pytest.raises(RefusedError, match="the lake is full") as refused:
        await publish(world, "a", 4)
    assert refused.value.exit_code == 4
    after = await read(world)
    assert (after.next_step, after.total_bytes) == (before.next_step, before.total_bytes)
    assert after.producers["a"].next_seq == 3


@scenario(simulate)
async def test_positions_that_grow_are_refused_before_no_snapshot_can_hold_them(world: World, monkeypatch):
    monkeypatch.setattr(rebase, "POSITIONS_BYTES_MAX", 5 * POSITION_BYTES)
    monkeypatch.setattr(rebase, "POSITION_BYTES_MAX", POSITION_BYTES + 10)
    for number in range(8):  # all join while there is room
        await publish(world, f"p{number}", b"")
    for number in range(4):
        await publish(world, f"p{number}", b"x" * POSITION_BYTES)
    with pytest.raises(RefusedError, match=r"producer 'p4': a position of 1003 bytes does not fit"):
        await publish(world, "p4", 7, b"x" * POSITION_BYTES)
    await publish(world, "p0", b"y" * POSITION_BYTES)  # those that do not grow go on
    await publish(world, "p4", b"z")
    state = await read(world)
    assert sum(len(producer.position) for producer in state.producers.values()) <= 5 * POSITION_BYTES
    assert decode_snapshot(encode_snapshot(state), "snapshot") == state
    await Group.of(world.store("run"), world.identity, "run", TrioClock()).add(Step(state.next_step))
    report = await reclaim(world.store("reclaim"), world.identity)
    assert report.first_live_step == state.next_step
    assert (await read(world)).producers == state.producers


@scenario(simulate)
async def test_a_lake_that_is_beyond_the_limit_lets_positions_stay_and_shrink(world: World, monkeypatch):
    for number in range(6):
        await publish(world, f"p{number}", b"x" * POSITION_BYTES)
    monkeypatch.setattr(rebase, "POSITIONS_BYTES_MAX", POSITION_BYTES)
    monkeypatch.setattr(rebase, "POSITION_BYTES_MAX", POSITION_BYTES + 10)
    await publish(world, "p0", b"y" * POSITION_BYTES)
    await publish(world, "p1", b"y")
    with pytest.raises(RefusedError, match="smaller positions"):
        await publish(world, "p1", b"y" * 900)
    assert (await read(world)).next_step == 8


@pytest.mark.parametrize("wrong", [{"total_records": 1 << 50}, {"time_ms": 1 << 54}, {"first_step": Step(9)}])
@scenario(simulate)
async def test_a_writer_that_is_wrong_writes_nothing(world: World, monkeypatch, wrong):
    sound = commit_loop.rebase  # type: ignore[attr-defined]

    def broken(*arguments: object) -> object:
        made = sound(*arguments)  # type: ignore[arg-type]
        return replace(made, **wrong) if isinstance(made, Commit) else made  # type: ignore[arg-type]

    async with world.producer("a") as producer:
        await feed(producer, 2)
    before = await read(world)
    monkeypatch.setattr(commit_loop, "rebase", broken)
    with pytest.raises(StepfsError, match="is not written"):
        async with world.producer("a") as producer:
            await append(producer, 2)
    epoch = before.version + 1
    assert (await read(world)).version == epoch
    slot = numbered(log_prefix(world.identity.lake_id), epoch + 1)
    assert await world.store("reader").get(slot) is None
    monkeypatch.setattr(commit_loop, "rebase", sound)
    async with world.producer("a") as producer:
        await feed(producer, 5)
    world.check(a=5)
