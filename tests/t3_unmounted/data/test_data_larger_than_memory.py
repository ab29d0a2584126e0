"""Slices larger than the budget: several GETs are in flight, and nothing is fetched twice."""

from __future__ import annotations

import random

import pytest
import trio
from at_work import at_work
from data_doubles import World

from stepfs.data.fetch import ConcurrencyLimit
from stepfs.data.slices import Slices
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step
from stepfs.reader.assembly import CopyPool

MIB = 1 << 20
BLOCKS = 16
CONNECTIONS = 4  # of which reading ahead in an open slice may take all
INDEX = SliceIndex(0)


@pytest.fixture(scope="module")
def world():
    made = World()
    made.add_step([BLOCKS * BLOCK_BYTES])
    made.add_step([BLOCKS * BLOCK_BYTES])
    return made


def slices_of(world, blocks, **options):
    limit = ConcurrencyLimit(CONNECTIONS, fixed=True)
    return Slices(world.store, memory_bytes=blocks * BLOCK_BYTES, concurrency=limit, **options)


def slow(world, latency_s=0.1):
    world.store.requests.clear()
    world.store.running_max = 0
    world.store.behave = lambda *_: latency_s


async def read_blocks(slices, world, numbers, *, step=0, piece=4 * MIB):
    """Seconds that it takes to read these blocks whole, in this order, `piece` bytes at a time."""
    handle = slices.open(world.entries[step], INDEX)
    began = trio.current_time()
    payload = world.payloads[step][0]
    for number in numbers:
        for offset in range(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES, piece):
            read = await handle.read(offset, piece)
            assert bytes(read) == payload[offset : offset + piece]  # views are compared byte by byte
            await trio.lowlevel.checkpoint()
    handle.close()
    return trio.current_time() - began


@pytest.mark.parametrize("kept", [False, True])
async def test_a_slice_larger_than_the_budget_is_read_as_fast_as_one_that_fits(nursery, autojump_clock, world, kept):
    took = []
    for memory in (BLOCKS + 4, CONNECTIONS + 2):
        slow(world)
        slices = await at_work(nursery, slices_of(world, memory, opened_are_kept=kept))
        took.append(await read_blocks(slices, world, range(BLOCKS)))
        assert slices.counts.bytes_fetched == BLOCKS * BLOCK_BYTES, "nothing twice"
    assert took[0] / took[1] >= 0.9


async def test_in_the_smallest_budget_all_but_two_buffers_are_in_flight(nursery, autojump_clock, world):
    slow(world)
    slices = await at_work(
        nursery, Slices(world.store, memory_bytes=8 * BLOCK_BYTES, concurrency=ConcurrencyLimit(16, fixed=True))
    )
    took = await read_blocks(slices, world, range(BLOCKS))
    assert took <= 0.1 * (BLOCKS / 6 + 2)
    assert slices.counts.requests == BLOCKS
    assert slices.cache.pool.used <= 8 * BLOCK_BYTES


async def test_two_readers_of_different_large_slices_share_the_budget(nursery, autojump_clock, world):
    slow(world)
    slices = await at_work(nursery, slices_of(world, CONNECTIONS + 2))
    began = trio.current_time()
    async with trio.open_nursery() as readers:
        for step in (0, 1):
            readers.start_soon(lambda step=step: read_blocks(slices, world, range(BLOCKS), step=step))
    assert slices.counts.requests <= 2 * BLOCKS + 4
    assert trio.current_time() - began <= 0.1 * (2 * BLOCKS / CONNECTIONS + 4)


async def test_a_second_pass_through_a_slice_larger_than_the_budget_reads_ahead_again(nursery, autojump_clock, world):
    slow(world)
    slices = await at_work(nursery, slices_of(world, CONNECTIONS + 2))
    took = await read_blocks(slices, world, [*range(BLOCKS), *range(BLOCKS)])
    assert slices.counts.requests <= 2 * BLOCKS
    assert took <= 0.1 * (2 * BLOCKS / CONNECTIONS + 4)


async def test_a_reader_that_jumps_about_fetches_what_it_reads_beyond_what_fits(nursery, autojump_clock, world):
    slow(world)
    slices = await at_work(nursery, slices_of(world, 4))
    jumps = [15, 3, 11, 7, 13, 5, 9, 1, 14, 6, 0]
    await read_blocks(slices, world, jumps)
    assert slices.counts.requests <= 2 * len(jumps) + 8


async def test_open_files_that_were_not_read_keep_their_bytes_beside_a_large_one(nursery, autojump_clock, world):
    slow(world)
    slices = await at_work(nursery, slices_of(world, BLOCKS + 6))
    unread = slices.open(world.entries[1], INDEX)
    await trio.sleep(10)
    assert slices.holds(Step(1), INDEX)
    await read_blocks(slices, world, range(BLOCKS))
    assert slices.holds(Step(1), INDEX)
    unread.close()


@pytest.mark.parametrize("kept", [False, True])
async def test_20_mib_are_fetched_once_into_18_mib_however_small_the_reads(nursery, autojump_clock, kept):
    world = World()
    world.add_step([20 * MIB])
    for piece in (64 << 10, MIB, BLOCK_BYTES):
        slow(world)
        slices = await at_work(nursery, Slices(world.store, memory_bytes=18 * MIB, opened_are_kept=kept))
        handle = slices.open(world.entries[0], INDEX)
        for offset in range(0, 20 * MIB, piece):
            expected = world.payloads[0][0][offset : offset + piece]
            assert await handle.read(offset, piece) == expected
        await trio.sleep(100)  # and nothing is fetched once it was read
        assert slices.counts.requests == 3
        assert slices.counts.bytes_fetched == 20 * MIB
        handle.close()


async def test_the_reader_without_a_mount_fetches_each_block_once(nursery, autojump_clock, world):
    slow(world)
    slices = await at_work(nursery, slices_of(world, CONNECTIONS + 2))
    handle = slices.open(world.entries[0], INDEX)
    assert await CopyPool(0).copy_of(handle) == world.payloads[0][0]
    assert slices.counts.requests == BLOCKS
    assert slices.counts.bytes_fetched == BLOCKS * BLOCK_BYTES


async def test_two_readers_far_apart_in_one_slice_both_end(nursery, autojump_clock, world):
    slow(world)
    slices = await at_work(nursery, slices_of(world, 8))
    async with trio.open_nursery() as readers:
        for first in (0, BLOCKS // 2):
            numbers = range(first, first + BLOCKS // 2)
            readers.start_soon(lambda numbers=numbers: read_blocks(slices, world, numbers, piece=MIB))
    assert slices.counts.requests <= 2 * BLOCKS
    fetched = slices.counts.requests
    await trio.sleep(100)
    assert slices.counts.requests == fetched


async def test_reads_at_random_cost_at_most_two_blocks_each(nursery, autojump_clock, world):
    slow(world)
    slices = await at_work(nursery, slices_of(world, 8))
    handle = slices.open(world.entries[0], INDEX)
    chosen = random.Random(1)
    for _ in range(100):
        offset = chosen.randrange(handle.length - 4096)
        assert await handle.read(offset, 4096) == world.payloads[0][0][offset : offset + 4096]
    await trio.sleep(100)
    assert slices.counts.requests <= 2 * 100


async def test_pages_read_again_and_again_cost_nothing_beyond_a_pass_each(nursery, autojump_clock, world):
    """A mapped file whose pages the kernel drops: faults in order, some twice, pass after pass."""
    slow(world)
    slices = await at_work(nursery, slices_of(world, 8))
    handle = slices.open(world.entries[0], INDEX)
    for passes in range(1, 4):
        for offset in range(0, handle.length, 128 << 10):
            for again in (offset, max(0, offset - (128 << 10))):
                await handle.read(again, 4096)
        assert slices.counts.requests <= passes * (BLOCKS + 2)


@pytest.mark.logs("step 0 has waited .* for memory")
async def test_a_reader_waits_for_memory_that_others_see_without_a_get(nursery, autojump_clock):
    world = World()
    world.add_step([20 * MIB])
    slices = await at_work(nursery, Slices(world.store, memory_bytes=18 * MIB, deadline_s=1000.0))
    handle = slices.open(world.entries[0], INDEX)
    views = [await handle.read(offset, MIB) for offset in range(0, 16 * MIB, MIB)]
    with trio.move_on_after(500) as waited:
        await handle.read(16 * MIB, MIB)
    assert waited.cancelled_caught
    assert slices.counts.requests == 2
    views.clear()
    assert await handle.read(16 * MIB, MIB) == world.payloads[0][0][16 * MIB : 17 * MIB]
    assert slices.counts.requests == 3


async def test_a_reader_gets_the_memory_of_readers_that_have_come_and_stay(nursery, autojump_clock):
    """Two blocks fit, and three ranks read one each: the third takes the memory of one that has its bytes."""
    world = World()
    world.add_step([BLOCK_BYTES] * 3)
    for _ in range(30):  # whom the loop resumes first, reader or loader, is by chance
        slow(world)
        slices = await at_work(nursery, Slices(world.store, memory_bytes=2 * BLOCK_BYTES))
        handles = [slices.open(world.entries[0], SliceIndex(index)) for index in range(3)]
        with trio.fail_after(1):
            async with trio.open_nursery() as ranks:
                for handle in handles:
                    ranks.start_soon(handle.read, 0, 4096)
        assert slices.counts.requests == 3
        for handle in handles:
            handle.close()
