"""`stepfs fork --until STEP --rewind`: producers stand where they stood at the cut, and make what it leaves out again."""

from __future__ import annotations

import pytest
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from producer_world import World, append, simulate
from scenarios import scenario

from stepfs.errors import RefusedError, UsageError
from stepfs.format.ids import Step
from stepfs.lake.fork import Cut, fork
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer


async def steps_by(world: World, who: str, numbers: range) -> None:
    async with world.producer(who) as producer:
        assert producer.position == (numbers.start or None)
        for number in numbers:
            await append(producer, number)
            await producer.flush()


async def cut_at(world: World, step: int, *, rewind: bool = True) -> LogReader:
    reader = await LogReader.open(world.store("operator"), world.identity)
    child = FaultyStore(ObjectMap(), actor=f"child-{step}-{rewind}")
    cut = Cut(Step(step), Step(step), Step(step), Step(step))
    identity = await fork(reader, child, cut, TrioClock(), rewind=rewind)
    return await LogReader.open(child, identity)


@scenario(simulate)
async def test_producers_go_back_to_the_cut_and_later_ones_are_gone(world: World) -> None:
    await steps_by(world, "still", range(2))
    await steps_by(world, "p", range(3))  # steps 2 to 4
    await steps_by(world, "q", range(2))  # 5 and 6
    await steps_by(world, "p", range(3, 6))  # 7 to 9, by another incarnation
    await steps_by(world, "late", range(1))
    head = (await LogReader.open(world.store("operator"), world.identity)).state.producers
    for step, p, q in ((8, 4, 2), (6, 3, 1), (4, 2, None)):
        found = (await cut_at(world, step)).state.producers
        stood = {name: producer.next_seq for name, producer in found.items()}
        assert stood == {"p": p, "still": 2} | ({} if q is None else {"q": q}), step
        assert found["still"].position == head["still"].position
    whole = await cut_at(world, 11)
    assert {name: one.next_seq for name, one in whole.state.producers.items()} == {
        "p": 6,
        "q": 2,
        "still": 2,
        "late": 1,
    }
    kept = await cut_at(world, 6, rewind=False)
    assert kept.state.producers["p"].next_seq == 6, "without it, nothing is made again"


@scenario(simulate)
async def test_they_make_again_what_was_left_out_and_nothing_twice(world: World) -> None:
    await steps_by(world, "p", range(6))
    child = await cut_at(world, 4)
    async with AsyncProducer(child.store.url, producer_id="p", store=child.store) as producer:
        assert (producer.position, producer.next_seq) == (4, 4)
        for number in range(4, 6):
            await append(producer, number)
    await child.refresh()
    await child.confirm()
    entries = [await child.entry(Step(step)) for step in range(6)]
    assert [entry.tgb.seq for entry in entries] == list(range(6))
    parent = await LogReader.open(world.store("operator"), world.identity)
    for step, entry in enumerate(entries):
        assert entry.tgb.packed_slices == (await parent.entry(Step(step))).tgb.packed_slices


@scenario(simulate)
async def test_a_cut_through_a_commit_and_one_through_a_fork_s_beginning_are_refused(world: World) -> None:
    async with world.producer("p") as producer:
        for number in range(6):
            await append(producer, number)
    reader = await LogReader.open(world.store("operator"), world.identity)
    versions = [(await reader.entry(Step(step))).version for step in range(6)]
    inside = next(step for step in range(1, 6) if versions[step] == versions[step - 1])
    with pytest.raises(UsageError, match=f"--until {inside}: one commit holds steps .* use --until "):
        await cut_at(world, inside)
    child = await cut_at(world, 6)
    with pytest.raises(RefusedError, match="leave --rewind out"):
        await fork(
            child,
            FaultyStore(ObjectMap(), actor="x"),
            Cut(Step(3), Step(3), Step(3), Step(3)),
            TrioClock(),
            rewind=True,
        )
