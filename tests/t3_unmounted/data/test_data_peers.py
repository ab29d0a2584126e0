"""Several readers of one slice, steps apart: its bytes are fetched once, as far as the budget reaches."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from at_work import at_work
from data_doubles import processor, world_of

from stepfs.data.prefetch import Prefetcher
from stepfs.data.slices import Slices
from stepfs.format.grid import Grid
from stepfs.format.ids import SliceIndex
from stepfs.view.ranks import rank_map

SIZE = 1 << 17
STEPS = 150
LAG = 20
INDEX = SliceIndex(0)


class Node:
    def __init__(self, world, memory_bytes, **options):
        self.world = world
        self.slices = Slices(world.store, memory_bytes=memory_bytes, **options)
        self.prefetcher = Prefetcher(self.slices, world, world, processor_s=processor())
        self.slices.on_reading = self.prefetcher.note_open

    async def run(self, *, task_status):
        async with trio.open_nursery() as nursery:
            await nursery.start(self.slices.run)
            await nursery.start(self.prefetcher.run)
            task_status.started()

    async def read(self, step):
        handle = self.slices.open(self.world.entries[step], INDEX)
        assert await handle.read(0, SIZE) == self.world.payloads[step][0]
        handle.close()

    async def train(self, steps, *, start_s=0.0, pace_s=0.1):
        await trio.sleep(start_s)
        for step in steps:
            await self.read(step)
            await trio.sleep(pace_s)


@pytest.fixture
def world():
    made = world_of(STEPS, SIZE)
    made.store.behave = lambda *_: 0.02
    return made


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("peers", [pytest.param(2, marks=pytest.mark.nightly), 3])
async def test_peers_that_are_twenty_steps_apart_cost_the_bytes_once(nursery, autojump_clock, world, kept, peers):
    node = await at_work(nursery, Node(world, peers * 30 * SIZE, opened_are_kept=kept, peers=peers))
    async with trio.open_nursery() as readers:
        for peer in range(peers):
            readers.start_soon(lambda peer=peer: node.train(range(STEPS), start_s=peer * LAG * 0.1))
    assert node.slices.counts.bytes_fetched == STEPS * SIZE
    assert node.slices.counts.misses <= peers


async def test_with_room_for_the_lag_nothing_is_fetched_twice(nursery, autojump_clock, world):
    node = await at_work(nursery, Node(world, 120 * SIZE, peers=2))
    async with trio.open_nursery() as readers:
        for peer in range(2):
            readers.start_soon(lambda peer=peer: node.train(range(STEPS), start_s=peer * LAG * 0.1))
    assert node.slices.counts.bytes_fetched == STEPS * SIZE
    assert node.slices.counts.misses == 1


@pytest.mark.parametrize(("peers", "ranks"), [(1, (0, 2)), (2, (0, 1)), (2, (0, 1, 2)), (4, range(8)), (1, ())])
def test_the_peers_of_a_node_follow_from_its_ranks(peers, ranks):
    assert rank_map(Grid(4), mesh="dp=2,tp=4" if peers == 4 else "dp=4,tp=2").peers_of(tuple(ranks)) == peers
