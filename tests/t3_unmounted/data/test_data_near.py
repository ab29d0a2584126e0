"""A nearer place: asked first, trusted in nothing, and never the reason for an error or a long wait."""

from __future__ import annotations

import logging
import random
from itertools import pairwise

import pytest
import trio
import trio.testing
from at_work import at_work
from data_doubles import LAKE_ID, HeldStore, World, read_all, world_of, world_with

from stepfs.data.slices import Slices
from stepfs.data.tuning import TUNING
from stepfs.errors import RefusedError, StoreUnreachableError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex
from stepfs.store.api import Entry, Progress, ignore_progress

MIB = 1 << 20


class Place(HeldStore):
    """With the objects of a world; `pieces`: so many reports of progress, a second apart."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.url = "memory://place"
        self.objects = dict(world.store.objects)
        self.pieces = 1
        self.behave = lambda number, offset, size: 0.01

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, landed: Progress = ignore_progress
    ) -> int | None:
        for piece in range(1, self.pieces):
            await trio.sleep(1)
            part = len(buffer) * piece // self.pieces
            buffer[:part] = self.objects[key][offset : offset + part]
            landed(part)
        return await super().read_into(key, offset, buffer, landed)

    async def list(self, prefix: str, *, after: str = "", limit: int | None = None, ages: bool = False) -> list[Entry]:
        return [Entry(key, len(body)) for key, body in self.objects.items() if key.startswith(prefix)][:limit]


def away(_number: int, _offset: int, _size: int) -> float:
    raise StoreUnreachableError("memory://held: connection refused")


async def started(nursery: trio.Nursery, world: World, place: Place, memory: int = 64 * MIB) -> Slices:
    slices = await at_work(nursery, Slices(world.store, memory_bytes=memory, near=place))
    assert slices.near is not None
    nursery.start_soon(slices.near.look, LAKE_ID)
    await trio.testing.wait_all_tasks_blocked()
    return slices


async def read(slices: Slices, world: World, step: int, index: int = 0) -> float:
    """Seconds that the read of a whole slice took; its bytes are right."""
    began = trio.current_time()
    handle = slices.open(world.entries[step], SliceIndex(index))
    assert await read_all(handle) == world.payloads[step][index]
    handle.close()
    return trio.current_time() - began


async def test_what_the_place_has_comes_from_there_alone(nursery, autojump_clock):
    world, _ = world_with([5, MIB, 2 * BLOCK_BYTES + 1])
    slices = await started(nursery, world, Place(world))
    for index in range(3):
        await read(slices, world, 0, index)
    assert world.store.requests == []
    counts = slices.counts
    assert counts.near_bytes == sum(map(len, world.payloads[0]))
    assert (counts.requests, counts.bytes_fetched, counts.near_absent, counts.near_failed) == (0, 0, 0, 0)


async def test_the_limit_of_connections_learns_from_the_place(nursery, autojump_clock):
    world = world_of(60, MIB, MIB, MIB, MIB)
    place = Place(world)
    place.behave = lambda number, offset, size: 0.1
    slices = await started(nursery, world, place, 512 * MIB)
    slices.request((entry, range(4)) for entry in world.entries)
    for step in range(60):
        for index in range(4):
            await read(slices, world, step, index)
    assert slices.connections_limit > TUNING.connections_min


@pytest.mark.logs("copy the object again")
async def test_absent_and_damaged_objects_alone_come_from_the_lake(nursery, autojump_clock, caplog):
    world = world_of(6, MIB, MIB)
    place = Place(world)
    keys = [entry.tgb.key for entry in world.entries]
    del place.objects[keys[1]], place.objects[keys[3]]
    place.objects[keys[4]] = place.objects[keys[4]][:-1000] + bytes(1000)
    slices = await started(nursery, world, place)
    for step in range(6):
        for index in range(2):
            await read(slices, world, step, index)
    assert sorted((key, number) for key, number, _ in world.store.requests) == sorted(
        (keys[step], world.entries[step].tgb.slice(SliceIndex(index)).offset)
        for step, index in [(1, 0), (1, 1), (3, 0), (3, 1), (4, 1)]
    )
    assert (slices.counts.near_absent, slices.counts.near_corrupt, slices.counts.near_failed) == (4, 1, 0)
    assert f"memory://place/{keys[4]}: " in caplog.text
    assert "copy the object again" in caplog.text


@pytest.mark.logs("does not answer")
async def test_a_late_answer_costs_two_seconds_once_and_its_bytes_go_nowhere(nursery, autojump_clock, caplog):
    world = world_of(4, MIB)
    place = Place(world)
    place.behave = lambda number, offset, size: 100.0 if number == 0 else 0.01
    place.spoil = lambda number, buffer: buffer.__setitem__(slice(0, 9), b"too late!") if number == 0 else None
    slices = await started(nursery, world, place)
    assert TUNING.silence_s <= await read(slices, world, 0) < TUNING.silence_s + 1
    assert "memory://place does not answer (too late)" in caplog.text
    assert await read(slices, world, 1) < 0.1, "it rests"
    assert len(place.requests) == 1
    await trio.sleep(TUNING.silent_rest_s)
    assert await read(slices, world, 2) < 0.1
    assert len(place.requests) == 2
    assert slices.budgets()["memory_bytes"] == 3 * MIB, "the late request has its buffer beside the readers' memory"
    await trio.sleep(200)
    assert slices.budgets()["memory_bytes"] == 3 * MIB
    for step in range(3):  # from memory: the late bytes changed none of it
        await read(slices, world, step)
    await read(slices, world, 3)


@pytest.mark.logs("does not answer")
async def test_a_place_that_hangs_for_good_takes_no_memory_from_readers(nursery, autojump_clock):
    """NFS whose server is away: no request ends, and none can be taken back."""
    world = world_of(200, 4 * MIB)
    place = Place(world)
    hangs = trio.Event()

    def behave(number: int, offset: int, size: int) -> float:
        return float("inf") if hangs.is_set() else 0.01

    place.behave = behave
    slices = await started(nursery, world, place, memory=16 * MIB)
    await read(slices, world, 0)
    hangs.set()
    for step in range(1, 200):
        slices.request((entry, [SliceIndex(0)]) for entry in world.entries[step : step + 8])
        assert await read(slices, world, step) <= TUNING.silence_s + 0.5
        await trio.sleep(1)
    assert place.running <= TUNING.connections_min
    asked = len(place.requests)
    await trio.sleep(600)
    await read(slices, world, 0)
    assert len(place.requests) == asked, "two requests are owed"


@pytest.mark.logs("does not answer")
async def test_a_slow_place_is_read_as_long_as_bytes_come(nursery, autojump_clock):
    world = world_of(2, MIB)
    place = Place(world)
    place.pieces = 8
    slices = await started(nursery, world, place)
    assert 7 <= await read(slices, world, 0) < TUNING.answer_most_s
    assert world.store.requests == []
    place.pieces = 40
    assert TUNING.answer_most_s <= await read(slices, world, 1) < TUNING.answer_most_s + 1
    assert len(world.store.requests) == 1
    assert slices.counts.near_failed == 1


async def test_a_busy_place_is_no_dead_one(nursery, autojump_clock):
    """It is late for one request and answers others: those that follow still go there."""
    world = world_of(12, MIB)
    place = Place(world)
    place.behave = lambda number, offset, size: 60.0 if number == 0 else 0.5
    slices = await started(nursery, world, place)
    async with trio.open_nursery() as readers:
        readers.start_soon(read, slices, world, 0)
        for step in range(1, 12):
            await read(slices, world, step)
    assert len(world.store.requests) == 1
    assert slices.counts.near_hits == 11


@pytest.mark.logs("does not answer")
async def test_rests_grow_and_end_with_the_first_answer(nursery, autojump_clock):
    world = world_of(440, 1000)
    place = Place(world)
    place.behave = away
    slices = await started(nursery, world, place)
    asked: list[float] = []
    await _ask(slices, world, place, range(300), asked)
    gaps = [round(after - before) for before, after in pairwise(asked)]
    assert gaps[:6] == [5, 10, 20, 40, 60, 60]
    place.behave = lambda number, offset, size: 0.01
    await trio.sleep(TUNING.silent_rest_max_s)
    before = len(world.store.requests)
    for step in range(300, 400):
        await read(slices, world, step)
    assert len(world.store.requests) == before
    place.behave = away
    await trio.sleep(TUNING.silence_s)
    asked.clear()
    await _ask(slices, world, place, range(400, 440), asked)
    assert [round(after - before) for before, after in pairwise(asked)] == [5, 10, 20]


async def _ask(slices: Slices, world: World, place: Place, steps: range, asked: list[float]) -> None:
    """Read a step a second, and note when the place is asked."""
    for step in steps:
        before = len(place.requests)
        await read(slices, world, step)
        if len(place.requests) > before:
            asked.append(trio.current_time())
        await trio.sleep(1)


@pytest.mark.logs("does not answer")
async def test_where_the_lake_does_not_answer_a_resting_place_is_asked_again(nursery, autojump_clock):
    world = world_of(2, MIB)
    place = Place(world)
    place.behave = lambda number, offset, size: 100.0 if number == 0 else 0.01
    world.store.behave = away
    slices = await started(nursery, world, place)
    assert await read(slices, world, 0) < 4
    assert await read(slices, world, 1) < 4
    assert slices.counts.near_hits == 2


@pytest.mark.logs("does not answer")
async def test_what_neither_has_is_an_error_at_the_deadline(nursery, autojump_clock):
    world, entry = world_with([MIB])
    place = Place(world)
    place.behave = world.store.behave = away
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB, near=place, deadline_s=30))
    with pytest.raises(StoreUnreachableError, match="did not deliver step 0 within 30 s"):
        await slices.open(entry, SliceIndex(0)).read(0, 10)


async def test_a_block_that_nobody_opened_waits_for_its_copy(nursery, autojump_clock):
    world = world_of(2, MIB)
    place = Place(world)
    later = place.objects.pop(world.entries[1].tgb.key)
    slices = await started(nursery, world, place)
    await read(slices, world, 0)
    slices.request([(world.entries[1], [SliceIndex(0)])])
    await trio.sleep(3)
    place.objects[world.entries[1].tgb.key] = later
    await trio.sleep(TUNING.near_absent_s)
    assert slices.holds(world.entries[1].step, SliceIndex(0))
    assert world.store.requests == []


async def test_it_waits_no_longer_once_somebody_opens_it(nursery, autojump_clock):
    world = world_of(2, MIB)
    place = Place(world)
    del place.objects[world.entries[1].tgb.key]
    slices = await started(nursery, world, place)
    slices.request([(world.entries[1], [SliceIndex(0)])])
    await trio.sleep(3)
    assert world.store.requests == []
    assert await read(slices, world, 1) < 0.1
    assert len(world.store.requests) == 1


@pytest.mark.logs("has no data of this lake")
@pytest.mark.parametrize("reason", ["its time is over", "a later step has come", "nothing ever came"])
async def test_it_waits_only_for_what_may_come(nursery, autojump_clock, reason):
    world = world_of(3, MIB)
    place = Place(world)
    gone = place.objects.pop(world.entries[1].tgb.key)
    if reason == "nothing ever came":
        place.objects.clear()
    slices = await started(nursery, world, place)
    if reason == "a later step has come":
        await read(slices, world, 2)
    slices.request([(world.entries[1], [SliceIndex(0)])])
    await trio.sleep(TUNING.near_absent_s + 1 if reason == "its time is over" else 0.5)
    assert slices.holds(world.entries[1].step, SliceIndex(0))
    assert len(world.store.requests) == 1
    assert gone


@pytest.mark.parametrize("pace_s", [1.0, 0.05])
@pytest.mark.parametrize("shuffled", [False, True])
async def test_a_place_with_a_part_of_the_objects_leaves_the_rest_to_reading_ahead(
    nursery, autojump_clock, shuffled, pace_s
):
    world = world_of(60, MIB)
    place = Place(world)
    for entry in world.entries[20:]:
        del place.objects[entry.tgb.key]
    slices = await started(nursery, world, place, memory=32 * MIB)
    order = list(range(60))
    if shuffled:
        random.Random(3).shuffle(order)
    waited = 0.0
    for number, step in enumerate(order):
        slices.request((world.entries[ahead], [SliceIndex(0)]) for ahead in order[number : number + 8])
        await trio.sleep(pace_s)
        waited += await read(slices, world, step)
    assert waited < 1.0
    assert slices.counts.near_hits == 20
    assert slices.counts.hits >= 50


async def test_absent_data_behind_the_newest_is_not_waited_for_wherever_it_was_read(nursery, autojump_clock):
    world = world_of(6, MIB)
    place = Place(world)
    del place.objects[world.entries[3].tgb.key]
    slices = await started(nursery, world, place)
    await read(slices, world, 5)
    await read(slices, world, 2)
    slices.request([(world.entries[3], [SliceIndex(0)])])
    await trio.sleep(0.5)
    assert slices.holds(world.entries[3].step, SliceIndex(0))


@pytest.mark.logs("has no data of this lake")
async def test_a_copy_that_begins_later_is_waited_for_soon(nursery, autojump_clock):
    world = world_of(2, MIB)
    place = Place(world)
    first, later = (place.objects.pop(entry.tgb.key) for entry in world.entries)
    slices = await started(nursery, world, place)
    await read(slices, world, 0)
    place.objects[world.entries[0].tgb.key] = first
    await trio.sleep(TUNING.near_absent_s + 1)
    slices.request([(world.entries[1], [SliceIndex(0)])])
    await trio.sleep(3)
    place.objects[world.entries[1].tgb.key] = later
    await trio.sleep(TUNING.near_absent_s)
    assert slices.holds(world.entries[1].step, SliceIndex(0))
    assert len(world.store.requests) == 1


@pytest.mark.logs("until it has, and answers")
@pytest.mark.parametrize("problem", ["absent", "refused"])
async def test_a_place_without_data_of_the_lake_is_told_once(nursery, autojump_clock, caplog, problem):
    caplog.set_level(logging.WARNING)
    world, _ = world_with([MIB])
    place = Place(world)
    place.objects.clear()

    async def refuse(*_: object, **__: object) -> list[Entry]:
        raise RefusedError("no credentials can be used")

    if problem == "refused":
        place.list = refuse  # type: ignore[method-assign]
    slices = await started(nursery, world, place)
    await trio.sleep(5 * TUNING.near_absent_s)
    said = "has no data of this lake" if problem == "absent" else "cannot be read (no credentials can be used)"
    (record,) = caplog.records
    assert record.getMessage() == (f"memory://place {said}: until it has, and answers, the lake's own store is read")
    await read(slices, world, 0)


async def test_a_block_that_waits_for_its_copy_keeps_no_daemon(nursery, autojump_clock):
    world = world_of(2, MIB)
    place = Place(world)
    del place.objects[world.entries[1].tgb.key]
    place.behave = lambda number, offset, size: 0.01 if number == 0 else 1.0
    slices = await started(nursery, world, place)
    await read(slices, world, 0)
    slices.request([(world.entries[1], [SliceIndex(0)])])
    await trio.testing.wait_all_tasks_blocked()  # the place is asked, and has not answered yet
    began = trio.current_time()
    await slices.settle()
    assert trio.current_time() - began < 1.5
