"""As many GETs at a time as the store is worth: more where connections are slow, few where a link is full."""

from __future__ import annotations

import pytest
import trio
from at_work import at_work
from data_doubles import indices, world_of

from stepfs.data.blocks import pieces_of
from stepfs.data.fetch import CONNECTIONS_MAX, ConcurrencyLimit
from stepfs.data.slices import Slices
from stepfs.data.tuning import TUNING
from stepfs.format.ids import BLOCK_BYTES, SliceIndex

KIB = 1 << 10
MIB = 1 << 20
STEPS = 100
PER_STEP = 32


def limit_after(rounds, latency_s, *, limit_max=CONNECTIONS_MAX, sizes=(MIB,), settled=0):
    """The limits after each round of GETs, all connections busy: `latency_s(limit, size)` each."""
    limit = ConcurrencyLimit(limit_max)
    seen = []
    for _ in range(rounds):
        for number in range(3 * limit.limit):
            started = [limit.start() for _ in range(limit.limit)]
            for each in started:
                size = sizes[number % len(sizes)]
                limit.end(each, size, latency_s(len(started), size))
        seen.append(limit.limit)
    return seen[settled:]


def per_connection(limit, size):
    return 0.03 + size / 9e6


def full_link(limit, size):
    return 0.02 + limit * size / 50e6


def test_slow_connections_are_multiplied_up_to_the_bound():
    seen = limit_after(20, per_connection, sizes=(MIB, 8 * MIB, 64 * KIB))
    assert max(seen) == CONNECTIONS_MAX
    assert max(limit_after(20, per_connection, limit_max=128)) == 128
    assert set(limit_after(20, per_connection, limit_max=12)) <= set(range(9, 13))


def test_on_a_full_link_few_are_under_way_and_it_stays_full():
    seen = limit_after(60, full_link, settled=40)
    assert max(seen) < 16
    alone, most = full_link(1, MIB), max(seen)
    assert most * MIB / full_link(most, MIB) >= 0.9 * 50e6 * (1 - 0.02 / alone / 10)


def test_a_link_that_eight_connections_fill_keeps_them():
    seen = limit_after(60, lambda limit, size: 0.03 + size / 50e6 * max(1.0, limit / 8), settled=40)
    assert min(seen) >= 6
    assert max(seen) <= 32


def test_it_finds_its_way_when_the_store_changes():
    limit = ConcurrencyLimit()
    slow = True

    def run(rounds):
        for _ in range(rounds):
            for _ in range(3):
                for each in [limit.start() for _ in range(limit.limit)]:
                    limit.end(each, MIB, (full_link if slow else per_connection)(limit.limit, MIB))

    run(60)
    assert limit.limit < 16
    slow = False
    run(60)
    assert limit.limit >= 48


def test_failures_and_a_store_that_is_hardly_asked_say_nothing():
    limit = ConcurrencyLimit()
    for _ in range(1000):
        limit.end(limit.start(), MIB, 0.1)
        for each in [limit.start() for _ in range(limit.limit)]:
            limit.end(each, MIB, None)
    assert limit.limit == TUNING.connections_min


def test_a_fixed_number_stays():
    limit = ConcurrencyLimit(3, fixed=True)
    for _ in range(100):
        for each in [limit.start() for _ in range(3)]:
            limit.end(each, MIB, 0.1)
    assert limit.limit == 3


@pytest.mark.parametrize("readers_wait", [True, False])
def test_more_are_tried_only_while_readers_wait(readers_wait):
    limit = ConcurrencyLimit()
    for _ in range(40):
        for each in [limit.start() for _ in range(limit.limit)]:
            limit.end(each, MIB, 0.1)
            limit.note_loaded(readers_wait=readers_wait)
    assert (limit.limit > TUNING.connections_min) == readers_wait


@pytest.fixture(scope="module")
def world():
    return world_of(STEPS, *[512 * KIB] * PER_STEP)


async def seconds_for(world, concurrency, *, latency_s):
    """How long readers wait for all steps but the first quarter, each prefetched as soon as there is room; and the most GETs
    at a time.
    """
    store = world.store
    store.running_max = 0
    store.requests.clear()
    store.behave = lambda _number, _offset, size: latency_s(store.running, size)
    slices = Slices(store, memory_bytes=192 * MIB, concurrency=concurrency)
    wishes = [(entry, [index]) for entry in world.entries for index in indices(*range(PER_STEP))]
    async with trio.open_nursery() as nursery:
        await nursery.start(slices.run)
        for number, (entry, (index,)) in enumerate(wishes):
            if number == len(wishes) // 4:
                began = trio.current_time()
            if number % 64 == 0:
                slices.request(wishes[number : number + 256])
            handle = slices.open(entry, SliceIndex(index))
            assert len(await handle.read(0, 16)) == 16
            handle.close()
        nursery.cancel_scope.cancel()
    return trio.current_time() - began, store.running_max


@pytest.mark.nightly
async def test_a_store_that_is_slow_for_each_connection_gives_what_32_connections_give(autojump_clock, world):
    """9 MB/s a connection and 30 ms."""
    fixed_s, _ = await seconds_for(world, ConcurrencyLimit(32, fixed=True), latency_s=per_connection)
    usual_s, most = await seconds_for(world, ConcurrencyLimit(), latency_s=per_connection)
    former_s, _ = await seconds_for(world, ConcurrencyLimit(16, fixed=True), latency_s=per_connection)
    bounded_s, bounded = await seconds_for(world, ConcurrencyLimit(8), latency_s=per_connection)
    assert fixed_s / usual_s >= 0.75, "0.87 to 1.03 in six runs"
    assert fixed_s / former_s <= 0.6, "else this store would not tell them apart"
    assert 32 < most <= CONNECTIONS_MAX
    assert bounded <= 8 < 16
    assert bounded_s > former_s


async def read_slice(slices, world, step):
    handle = slices.open(world.entries[step], SliceIndex(0))
    for offset in range(0, handle.length, MIB):
        await handle.read(offset, MIB)
    handle.close()


@pytest.mark.parametrize("link", [pytest.param("full", marks=pytest.mark.nightly), "far"])
async def test_an_open_slice_has_four_gets_under_way_and_more_where_more_deliver_more(nursery, autojump_clock, link):
    """Nothing is fetched ahead. A full link takes twice as long for twice as many GETs, a store far away does not."""
    steps = 4 if link == "full" else 6
    world = world_of(steps, 12 * BLOCK_BYTES)
    store = world.store
    store.behave = lambda *_: 0.02 * store.running if link == "full" else 0.1
    slices = await at_work(nursery, Slices(store, memory_bytes=256 * MIB))
    await read_slice(slices, world, 0)
    assert store.running_max == 4
    offsets = [offset for _, offset, _ in store.requests]
    assert all(abs(offsets.index(piece.offset) - piece.block) < 4 for piece in pieces(world, 0)), "in order"
    for step in range(1, steps):
        store.running_max = 0
        await read_slice(slices, world, step)
    if link == "full":
        assert store.running_max <= 4
    else:
        assert store.running_max >= 12
    assert len(store.requests) - slices.counts.hedges == steps * 12


async def test_while_blocks_of_an_open_slice_are_held_back_nothing_is_fetched_ahead(nursery, autojump_clock):
    world = world_of(3, 6 * BLOCK_BYTES)
    world.store.behave = lambda *_: 1.0
    slices = await at_work(nursery, Slices(world.store, memory_bytes=512 * MIB))
    slices.request([(entry, [SliceIndex(0)]) for entry in world.entries[1:]])
    handle = slices.open(world.entries[0], SliceIndex(0))
    await trio.sleep(0.5)
    first = world.entries[0].tgb.key
    assert [key for key, _, _ in world.store.requests] == [first] * 4
    await trio.sleep(1)
    assert [key for key, _, _ in world.store.requests].count(first) == 6
    assert len(world.store.requests) > 6, "with all of it under way, the next steps' turn has come"
    handle.close()


def pieces(world, step):
    return pieces_of(SliceIndex(0), world.entries[step].tgb.slice(SliceIndex(0)))
