"""Several readers of one slice, steps apart: its bytes are fetched once, as far as the budget reaches."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from at_work import at_work
from data_doubles import processor, world_of

from stepfs.data.cache.readers import ReaderCounts
from stepfs.data.prefetch.prefetcher import Prefetcher
from stepfs.data.slices import Slices
from stepfs.format.ids import SliceIndex, Step

MIB = 1 << 20
STEPS = 150
LAG = 20
INDEX = SliceIndex(0)


class Node:
    def __init__(self, world, memory_bytes, **options):
        self.world = world
        self.slices = Slices(world.store, memory_bytes=memory_bytes, **options)
        self.prefetcher = Prefetcher(self.slices, world, world, processor_s=processor())
        self.slices.reads.on_reading = self.prefetcher.note_open

    async def run(self, *, task_status):
        async with trio.open_nursery() as nursery:
            await nursery.start(self.slices.run)
            await nursery.start(self.prefetcher.run)
            task_status.started()

    async def read(self, step):
        handle = self.slices.reads.open(self.world.entries[step], INDEX)
        assert await handle.read(0, MIB) == self.world.payloads[step][0]
        handle.close()

    async def train(self, steps, *, start_s=0.0, pace_s=0.1):
        await trio.sleep(start_s)
        for step in steps:
            await self.read(step)
            await trio.sleep(pace_s)


@pytest.fixture
def world():
    made = world_of(STEPS, MIB)
    made.store.behave = lambda *_: 0.02
    return made


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("peers", [2, 3])
async def test_peers_that_are_twenty_steps_apart_cost_the_bytes_once(nursery, autojump_clock, world, kept, peers):
    """As soon as it is learned that there are so many: here while the budget is full."""
    node = await at_work(nursery, Node(world, peers * 30 * MIB, opened_are_kept=kept))
    learned_s = (peers - 1) * LAG * 0.1 + 3
    fetched = []
    async with trio.open_nursery() as readers:
        for peer in range(peers):
            readers.start_soon(lambda peer=peer: node.train(range(STEPS), start_s=peer * LAG * 0.1))
        await trio.sleep(learned_s)
        fetched.append(node.slices.counts.bytes_fetched)
        before = {step for step in range(STEPS) if node.slices.holds(Step(step), INDEX)}
    fetched.append(node.slices.counts.bytes_fetched)
    assert fetched[1] - fetched[0] <= (STEPS - max(before) + 1) * MIB
    assert node.slices.counts.misses <= 8 * peers


async def test_with_room_for_the_lag_nothing_is_fetched_twice(nursery, autojump_clock, world):
    node = await at_work(nursery, Node(world, 120 * MIB))
    async with trio.open_nursery() as readers:
        for peer in range(2):
            readers.start_soon(lambda peer=peer: node.train(range(STEPS), start_s=peer * LAG * 0.1))
    assert node.slices.counts.bytes_fetched == STEPS * MIB
    assert node.slices.counts.misses == 1


async def test_when_a_peer_ends_its_share_of_the_budget_goes_back_to_reading_ahead(nursery, autojump_clock, world):
    node = await at_work(nursery, Node(world, 48 * MIB))
    async with trio.open_nursery() as readers:
        readers.start_soon(node.train, range(STEPS))
        readers.start_soon(lambda: node.train(range(40), start_s=LAG * 0.1))
        await trio.sleep(4)
        assert node.slices.cache.evictable.awaited_bytes >= 15 * MIB
        await trio.sleep(9)
        assert node.slices.cache.evictable.awaited_bytes == 0


def key(step):
    return Step(step), INDEX


def used(counts, step):
    counts.note_open(key(step))
    counts.note_close(key(step))


def test_a_single_reader_awaits_nobody():
    counts = ReaderCounts()
    for step in range(300):
        used(counts, step)
        assert not counts.is_awaited(key(step))


@pytest.mark.parametrize("readers", [2, 3, 8])
def test_the_number_of_readers_is_learned(readers):
    counts = ReaderCounts()
    for step in range(100 + readers * LAG):
        for reader in range(readers):
            if step >= reader * LAG:
                used(counts, step - reader * LAG)
    assert counts.expected == readers
    assert counts.is_awaited(key(100 + readers * LAG - 2))
    assert not counts.is_awaited(key(100))


def test_a_validation_pass_now_and_then_is_no_second_reader():
    counts = ReaderCounts()
    for step in range(600):
        used(counts, 1000 + step)
        if step % 60 == 0:
            for validated in range(8):
                used(counts, validated)
        assert counts.expected == 1
