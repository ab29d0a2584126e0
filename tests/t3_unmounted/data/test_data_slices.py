"""Slices: fetched whole, served block by verified block, once for all readers, pinned until closed."""

from __future__ import annotations

import errno
import gc
import mmap
from dataclasses import replace

import pytest
import trio
import trio.testing
from at_work import at_work
from data_doubles import World, indices, read_all, world_with

from stepfs.data.fetch import ConcurrencyLimit
from stepfs.data.slices import Slices
from stepfs.errors import AbsentError, CorruptError, RefusedError, StoreUnreachableError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step

MIB = 1 << 20


async def test_bytes_are_exactly_the_committed_ones(nursery, autojump_clock):
    world = World()
    sizes = [0, 1, 4095, 4096, MIB, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 20 * MIB + 7]
    entry = world.add_step(sizes)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    for number, payload in enumerate(world.payloads[0]):
        handle = slices.reads.open(entry, SliceIndex(number))
        assert handle.length == len(payload)
        assert await read_all(handle) == payload
        assert bytes(await handle.read(len(payload), 1)) == b""
        assert bytes(await handle.read(max(len(payload) - 3, 0), 100)) == payload[-3:]
        handle.close()
    with pytest.raises(IndexError):
        slices.reads.open(entry, SliceIndex(len(sizes)))


async def test_a_read_across_blocks_is_joined(nursery, autojump_clock):
    world, entry = world_with([3 * BLOCK_BYTES])
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handle = slices.reads.open(entry, SliceIndex(0))
    start = BLOCK_BYTES - 5
    assert bytes(await handle.read(start, BLOCK_BYTES + 10)) == world.payloads[0][0][start : start + BLOCK_BYTES + 10]


async def test_a_reader_gets_its_bytes_once_the_system_has_memory_again(nursery, autojump_clock, monkeypatch):
    """Overcommit, or RLIMIT_AS, may end before our own limit: nothing else is under way that would wake us."""
    world, entry = world_with([2 * MIB])
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    refused = 0
    real = mmap.mmap

    def refuse(*arguments, **options):
        nonlocal refused
        refused += 1
        if refused <= 3:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(*arguments, **options)

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert await read_all(slices.reads.open(entry, SliceIndex(0))) == world.payloads[0][0]


async def test_one_flight_for_32_concurrent_readers(nursery, autojump_clock):
    world, entry = world_with([MIB])
    world.store.behave = lambda *_: 1.0
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))

    async def reader():
        handle = slices.reads.open(entry, SliceIndex(0))
        assert await read_all(handle) == world.payloads[0][0]
        handle.close()

    async with trio.open_nursery() as readers:
        for _ in range(32):
            readers.start_soon(reader)
    assert len(world.store.requests) == slices.counts.requests == 1
    assert slices.counts.misses == 32
    assert slices.counts.bytes_delivered == 32 * MIB


async def test_block_0_is_served_while_block_5_hangs(nursery, autojump_clock):
    world, entry = world_with([6 * BLOCK_BYTES])
    base = entry.tgb.slice(SliceIndex(0)).offset
    gate = world.store.gates[base + 5 * BLOCK_BYTES] = trio.Event()
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handle = slices.reads.open(entry, SliceIndex(0))
    payload = world.payloads[0][0]
    for block in range(5):
        assert bytes(await handle.read(block * BLOCK_BYTES, 10)) == payload[block * BLOCK_BYTES :][:10]
    with trio.move_on_after(3) as scope:
        await handle.read(5 * BLOCK_BYTES, 10)
    assert scope.cancelled_caught
    gate.set()
    assert bytes(await handle.read(5 * BLOCK_BYTES, 10)) == payload[5 * BLOCK_BYTES :][:10]
    assert len(world.store.requests) == 6


async def test_the_block_a_reader_waits_for_is_fetched_next(nursery, autojump_clock):
    world, entry = world_with([8 * BLOCK_BYTES])
    base = entry.tgb.slice(SliceIndex(0)).offset
    world.store.behave = lambda *_: 1.0
    slices = await at_work(nursery, Slices(world.store, memory_bytes=128 * MIB, concurrency=ConcurrencyLimit(1)))
    handle = slices.reads.open(entry, SliceIndex(0))
    await trio.testing.wait_all_tasks_blocked()
    await handle.read(6 * BLOCK_BYTES, 1)
    assert [(offset - base) // BLOCK_BYTES for _, offset, _ in world.store.requests][:2] == [0, 6]
    await handle.read(5 * BLOCK_BYTES, 1)


async def test_neighbours_opened_together_cost_one_get(nursery, autojump_clock):
    world, entry = world_with([64 << 10] * 64)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handles = [slices.reads.open(entry, index) for index in indices(*range(8, 16))]
    for number, handle in enumerate(handles, start=8):
        assert await read_all(handle) == world.payloads[0][number]
    assert len(world.store.requests) == 1
    assert slices.counts.bytes_fetched <= 1.02 * slices.counts.bytes_delivered


async def test_pinned_bytes_outlive_their_object(nursery, autojump_clock):
    world, entry = world_with([2 * BLOCK_BYTES])
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handle = slices.reads.open(entry, SliceIndex(0))
    await handle.read(0, 1)
    await trio.testing.wait_all_tasks_blocked()
    world.store.objects.clear()
    slices.forget_below(Step(1))
    assert await read_all(handle) == world.payloads[0][0]
    handle.close()
    assert not slices.holds(Step(0), SliceIndex(0))
    assert slices.cache.pool.used == 0


async def test_a_view_in_flight_keeps_its_bytes(nursery, autojump_clock):
    """What the kernel is being given must not be overwritten by the next fetch into a reused buffer."""
    world = World()
    first, second = world.add_step([2 * MIB]), world.add_step([2 * MIB])
    slices = await at_work(nursery, Slices(world.store, memory_bytes=4 * MIB))
    handle = slices.reads.open(first, SliceIndex(0))
    view = await handle.read(0, 2 * MIB)
    handle.close()
    slices.forget_below(Step(1))
    other = slices.reads.open(second, SliceIndex(0))
    await other.read(0, 1)
    assert bytes(view) == world.payloads[0][0]
    other.close()


async def test_memory_seen_by_a_view_is_not_spent_twice(nursery, autojump_clock):
    world = World()
    first, second = world.add_step([2 * MIB]), world.add_step([2 * MIB])
    slices = await at_work(nursery, Slices(world.store, memory_bytes=2 * MIB))
    handle = slices.reads.open(first, SliceIndex(0))
    view = await handle.read(0, 2 * MIB)
    handle.close()
    other = slices.reads.open(second, SliceIndex(0))
    with trio.move_on_after(5) as scope:
        await other.read(0, 1)
    assert scope.cancelled_caught, "the only buffer is still seen by the first reader"
    assert bytes(view) == world.payloads[0][0]
    del view
    assert await read_all(other) == world.payloads[1][0]


async def test_a_bit_flipped_on_the_way_is_fetched_again(nursery, autojump_clock):
    world, entry = world_with([MIB])

    def spoil(number, buffer):
        if number == 0:
            buffer[77] ^= 1

    world.store.spoil = spoil
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handle = slices.reads.open(entry, SliceIndex(0))
    assert await read_all(handle) == world.payloads[0][0]
    assert (slices.counts.requests, slices.counts.corrupt) == (2, 1)


@pytest.mark.logs("CRC32C")
async def test_a_corrupt_slice_fails_alone_and_names_its_object(nursery, autojump_clock):
    world, entry = world_with([MIB, MIB])
    bad, good = entry.tgb.slice(SliceIndex(0)), entry.tgb.slice(SliceIndex(1))
    data = bytearray(world.store.objects[entry.tgb.key])
    data[bad.offset + 5] ^= 0x40
    world.store.objects[entry.tgb.key] = bytes(data)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handle = slices.reads.open(entry, SliceIndex(0))
    for _ in range(3):
        with pytest.raises(CorruptError, match=rf"{entry.tgb.key}.*slice 0 .*{bad.crc32c:08x}"):
            await handle.read(0, 1)
    assert slices.counts.requests == 2, "an open file that failed is not fetched for every read"
    other = slices.reads.open(entry, SliceIndex(1))
    assert await read_all(other) == world.payloads[0][1]
    assert good.length == other.length
    handle.close()
    world.store.objects[entry.tgb.key] = (
        bytes(data[: bad.offset + 5]) + bytes([data[bad.offset + 5] ^ 0x40]) + bytes(data[bad.offset + 6 :])
    )
    again = slices.reads.open(entry, SliceIndex(0))
    assert await read_all(again) == world.payloads[0][0], "a restored object is readable after reopening"


@pytest.mark.logs("CRC32C")
@pytest.mark.parametrize("ahead", [False, True], ids=["opened", "fetched ahead"])
async def test_one_rotten_slice_in_a_joined_get_fails_alone(nursery, autojump_clock, ahead):
    world, entry = world_with([MIB // 4] * 8)
    data = bytearray(world.store.objects[entry.tgb.key])
    data[entry.tgb.slice(SliceIndex(5)).offset + 5] ^= 0x40
    world.store.objects[entry.tgb.key] = bytes(data)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    if ahead:
        slices.request([(entry, indices(*range(8)))])
        await trio.sleep(1)
    began = trio.current_time()
    handles = [slices.reads.open(entry, SliceIndex(index)) for index in range(8)]
    got: dict[int, bytes] = {}

    async def read(index):
        if index == 5:
            with pytest.raises(CorruptError, match="slice 5 "):
                await handles[index].read(0, 1)
        else:
            got[index] = await read_all(handles[index])

    async with trio.open_nursery() as readers:
        for index in range(8):
            readers.start_soon(read, index)
    assert got == {index: world.payloads[0][index] for index in range(8) if index != 5}
    assert trio.current_time() - began < 1, "a neighbour waits for no rest"
    first, second = world.store.requests[:2]
    assert first == second
    assert first[2] == 2 * MIB, "one GET for all, and once more"


@pytest.mark.logs("truncated")
async def test_an_object_that_was_cut_fails_only_the_slices_behind_the_cut(nursery, autojump_clock):
    world, entry = world_with([MIB // 4] * 4)
    cut = entry.tgb.slice(SliceIndex(2)).offset
    world.store.objects[entry.tgb.key] = world.store.objects[entry.tgb.key][: cut + 5]
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handles = [slices.reads.open(entry, SliceIndex(index)) for index in range(4)]
    for index, handle in enumerate(handles):
        if index < 2:
            assert await read_all(handle) == world.payloads[0][index]
        else:
            with pytest.raises(CorruptError, match="truncated"):
                await handle.read(0, 1)


@pytest.mark.logs("truncated")
async def test_a_truncated_object_is_corrupt(nursery, autojump_clock):
    world, entry = world_with([MIB])
    world.store.objects[entry.tgb.key] = world.store.objects[entry.tgb.key][:1000]
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    with pytest.raises(CorruptError, match="truncated object, 936 of 1048576 bytes"):
        await slices.reads.open(entry, SliceIndex(0)).read(0, 1)


@pytest.mark.logs("is gone")
async def test_a_lost_object_is_absent(nursery, autojump_clock):
    world, entry = world_with([MIB])
    world.store.objects.clear()
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    with pytest.raises(AbsentError, match="step 0"):
        await slices.reads.open(entry, SliceIndex(0)).read(0, 1)


async def test_an_unreachable_store_means_later_and_ends_at_the_deadline(nursery, autojump_clock):
    world, entry = world_with([MIB])
    down_until = 20.0

    def behave(number, offset, size):
        if trio.current_time() < start + down_until:
            raise StoreUnreachableError("down")
        return 0.0

    start = trio.current_time()
    world.store.behave = behave
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB, deadline_s=60))
    handle = slices.reads.open(entry, SliceIndex(0))
    assert await read_all(handle) == world.payloads[0][0]
    assert 20 <= trio.current_time() - start < 30
    handle.close()
    slices.forget_below(Step(1))
    start, down_until = trio.current_time(), 1000.0
    handle = slices.reads.open(entry, SliceIndex(0))
    with pytest.raises(StoreUnreachableError, match="step 0 within 60 s"):
        await handle.read(0, 1)
    assert trio.current_time() - start == pytest.approx(60, abs=1)


@pytest.mark.parametrize(("error", "looks_max"), [(StoreUnreachableError("away"), 30), (RefusedError("not there"), 1)])
async def test_an_origin_that_is_away_is_asked_like_a_store_that_is(error, looks_max, nursery, autojump_clock):
    """Whether the lake that a fork shares steps with is there takes a request: rare in an outage, and no memory is lost."""
    world, entry = world_with([1000])
    shared = replace(entry, tgb=replace(entry.tgb, origin=1))
    looks = []

    async def origin(_tgb):
        await trio.sleep(0.001)
        looks.append(trio.current_time())
        if len(looks) > looks_max or trio.current_time() > looks[0] + 60:
            return world.store
        raise error

    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB, origin_store=origin))
    handle = slices.reads.open(shared, SliceIndex(0))
    if isinstance(error, RefusedError):
        with pytest.raises(RefusedError, match="not there"):
            await read_all(handle)
        handle.close()
        gc.collect()
        slices.cache.pool.sweep()
        assert slices.cache.pool.used == 0
    else:
        assert await read_all(handle) == world.payloads[0][0]
        assert looks[-1] > looks[0] + 60
