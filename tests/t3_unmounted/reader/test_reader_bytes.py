"""The bytes that a reader without a mount gives: the committed ones or an error, fetched once, copied once."""

from __future__ import annotations

import gc

import pytest
import trio
from doubles.faulty_store import FaultyStore
from hypothesis import given, settings
from hypothesis import strategies as st
from shelf import SMALL, Shelf, outcome_of, payload
from trio.testing import MockClock

from stepfs.data.hints import ShuffleHint, StridedOrder
from stepfs.errors import CorruptError, ReclaimedError
from stepfs.format.ids import SliceIndex, Step
from stepfs.reader.assembly import CopyPool

MIB = 1 << 20


@settings(max_examples=15)
@given(
    sizes=st.lists(st.sampled_from([0, 1, SMALL, 65536, MIB - 1, MIB, 3 * MIB + 5]), min_size=1, max_size=5),
    readers=st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), max_size=6), max_size=4),
    memory=st.sampled_from([13, 16, 64]),
    held=st.booleans(),
)
def test_any_interleaving_of_reads_gives_the_committed_bytes(sizes, readers, memory, held):
    async def main() -> None:
        shelf = await Shelf.of(*sizes)
        views = []
        async with shelf.reader(memory_bytes=memory * MIB) as reader:

            async def read(places) -> None:
                for step, index in places:
                    if step < len(sizes):
                        view = await reader.read(Step(step), SliceIndex(index))
                        assert view.readonly
                        assert view.contiguous
                        assert bytes(view) == shelf.expected(step, index)
                        if held:
                            views.append((step, index, view))

            async with trio.open_nursery() as nursery:
                for places in readers:
                    nursery.start_soon(read, places)
            # What callers still hold has not changed, whatever was read since.
            assert all(bytes(view) == shelf.expected(step, index) for step, index, view in views)
            assert reader.slices.cache.pool.used <= reader.slices.cache.pool.limit
        assert all(bytes(view) == shelf.expected(step, index) for step, index, view in views)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_slice_larger_than_the_memory_is_read_whole(autojump_clock):
    shelf = await Shelf.of(25 * MIB)
    async with shelf.reader(memory_bytes=24 * MIB) as reader:
        view = await reader.read(Step(0), SliceIndex(1))
        assert view == shelf.expected(0, 1)


async def test_many_readers_of_a_slice_share_one_fetch_and_each_copies_once(autojump_clock):
    shelf = await Shelf.of(2 * MIB)
    async with shelf.reader() as reader:
        views = []

        async def read() -> None:
            views.append(await reader.read(Step(0), SliceIndex(1)))

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(read)
        assert [bytes(view) for view in views] == [shelf.expected(0, 1)] * 8
        assert reader.slices.counts.bytes_fetched == 2 * MIB + 1
        assert reader.slices.counts.requests == 1
        assert reader.slices.counts.bytes_delivered == 8 * (2 * MIB + 1), "each copies once"


async def test_memory_is_used_again_only_when_nobody_sees_it():
    class Whole:
        length = 2 * MIB

        def __init__(self, fill: int) -> None:
            self.fill = fill

        async def read(self, offset, size):
            return memoryview(bytes([self.fill]) * min(size, self.length - offset))

    lending = CopyPool(4 * MIB)
    first, second = await lending.copy_of(Whole(1)), await lending.copy_of(Whole(2))
    beyond = await lending.copy_of(Whole(3))  # the budget is held: memory of its own
    assert (first[0], second[-1], beyond[7]) == (1, 2, 3)
    assert lending._pool.used == 4 * MIB
    part = first[5:10]
    address = id(first.obj)
    del first
    fourth = await lending.copy_of(Whole(4))
    assert part == bytes([1]) * 5, "a slice of a view keeps the memory as well"
    assert id(fourth.obj) != address
    del part
    fifth = await lending.copy_of(Whole(5))
    assert id(fifth.obj) == address, "used again"
    with pytest.raises(TypeError):
        fifth[0] = 1


async def test_a_read_that_fails_gives_its_memory_back():
    class Broken:
        length = 2 * MIB

        async def read(self, offset, size):
            raise CorruptError("x.tgb: rotten")

    lending = CopyPool(4 * MIB)
    for _ in range(5):
        with pytest.raises(CorruptError):
            await lending.copy_of(Broken())
    gc.collect()
    lending._pool.sweep()
    assert lending._pool.used == 0


async def test_a_damaged_slice_is_an_error_for_it_alone(autojump_clock):
    shelf = await Shelf.of(SMALL, SMALL)
    key = shelf.data_key(0)
    body = bytearray(shelf.shared.objects[key])
    at = bytes(body).index(payload(0, 1, SMALL + 1))
    body[at + 3] ^= 1
    shelf.shared.objects[key] = bytes(body)
    async with shelf.reader() as reader:
        for _ in range(2):
            error = await outcome_of(shelf.read, reader, 0, 1)
            assert isinstance(error, CorruptError)
            assert key in str(error)
            assert await shelf.read(reader, 0, 0) == shelf.expected(0, 0)
        assert await shelf.read(reader, 1, 1) == shelf.expected(1, 1)
        shelf.shared.objects[key] = body[:at] + payload(0, 1, SMALL + 1) + body[at + SMALL + 1 :]
        assert await shelf.read(reader, 0, 1) == shelf.expected(0, 1), "it was restored"


async def test_a_lost_object_is_damage_and_a_reclaimed_one_is_not(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 4)
    async with shelf.reader(poll_s=60.0) as reader:
        await shelf.checkpoint("train", 2)
        await shelf.reclaim()  # the reader has not seen it yet
        assert reader.tree.readable(Step(1))
        assert isinstance(await outcome_of(shelf.read, reader, 1, 0), ReclaimedError)
        lost = shelf.data_key(1)  # of the steps that are left, the second
        del shelf.shared.objects[lost]
        error = await outcome_of(shelf.read, reader, 3, 0)
        assert isinstance(error, CorruptError)
        assert lost in str(error)
        assert await shelf.read(reader, 2, 0) == shelf.expected(2, 0)


async def test_steps_in_order_are_fetched_ahead(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 12)
    async with shelf.reader(ranks=(0,)) as reader:
        for step in range(6):
            assert await shelf.read(reader, step, 0) == shelf.expected(step, 0)
            await trio.sleep(1)
        assert reader.slices.counts.hits >= 4
        assert not reader.slices.holds(Step(8), SliceIndex(1))


async def test_nothing_is_fetched_before_a_step_was_read_or_announced(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 12)
    async with shelf.reader(ranks=(0,)) as reader:
        await trio.sleep(5)
        assert reader.slices.counts.requests == 0


async def test_one_of_several_workers_fetches_what_it_was_told_and_nothing_else(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 24)
    async with shelf.reader(ranks=(0,), workers=3) as reader:
        await reader.announce(ShuffleHint(StridedOrder(Step(1), Step(24), 1, 3), 0))
        await trio.sleep(2)
        assert reader.slices.counts.requests > 0
        for step in range(1, 24, 3):
            assert await shelf.read(reader, step, 0) == shelf.expected(step, 0)
            await trio.sleep(1)
        counts = reader.slices.counts
        assert counts.bytes_fetched == counts.bytes_delivered == 8 * SMALL
        assert counts.misses == 0


async def test_one_of_several_workers_guesses_nothing(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 24)
    async with shelf.reader(ranks=(0,), workers=3) as reader:
        for step in range(10):
            await shelf.read(reader, step, 0)
            await trio.sleep(1)
        assert reader.slices.counts.bytes_fetched == 10 * SMALL


async def test_a_slow_store_is_asked_again(autojump_clock):
    """Hedging and retries are those of a mount."""

    class Slow(FaultyStore):
        calls = 0

        async def read_into(self, key, *args, **options):
            Slow.calls += 1
            if Slow.calls == 30:
                await trio.sleep(100)
            return await super().read_into(key, *args, **options)

    shelf = await Shelf.of(*[SMALL] * 40)
    async with shelf.reader(store=Slow(shelf.shared, actor="reader")) as reader:
        began = trio.current_time()
        for step in range(40):
            assert await shelf.read(reader, step, 0) == shelf.expected(step, 0)
        assert trio.current_time() - began < 20
        assert reader.slices.counts.hedges > 0
