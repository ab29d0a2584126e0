"""Prefetching against a store: what is opened next is at hand, and nothing else was fetched."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest
import trio
import trio.testing
from at_work import at_work
from data_doubles import World, indices, processor, world_of
from data_pages import Pages

from stepfs.data import page_cache
from stepfs.data.page_cache import Primer
from stepfs.data.prefetch import Prefetcher, ReadersState
from stepfs.data.slices import Slices
from stepfs.errors import AbsentError, CorruptError, RefusedError, StoreUnreachableError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step
from stepfs.mount.state import State, taken

KIB = 1 << 10
MIB = 1 << 20


async def quiet():
    await trio.sleep(0.1)
    await trio.testing.wait_all_tasks_blocked()


class Node:
    """A mount without a kernel: opens, reads and closes files, and tells the prefetcher."""

    def __init__(self, world, *, memory_bytes=256 * MIB, **options):
        self.world = world
        self.slices = Slices(world.store, memory_bytes=memory_bytes)
        self.prefetcher = Prefetcher(self.slices, world, world, processor_s=processor(), **options)

    async def run(self, *, task_status):
        async with trio.open_nursery() as nursery:
            await nursery.start(self.slices.run)
            await nursery.start(self.prefetcher.run)
            task_status.started()

    async def read(self, step, index):
        handle = self.slices.open(self.world.entries[step], SliceIndex(index))
        self.prefetcher.note_open(Step(step), SliceIndex(index))
        data = b""
        while part := await handle.read(len(data), MIB):
            data += part
        handle.close()
        assert data == self.world.payloads[step][index]


async def test_a_steady_reader_waits_only_for_its_first_steps(nursery, autojump_clock):
    world = world_of(40, *[64 * KIB] * 8)
    world.store.behave = lambda *_: 0.05
    node = await at_work(nursery, Node(world))
    for step in range(40):
        await node.read(step, 5)
        await trio.sleep(0.1)
    assert node.slices.counts.misses == 1
    assert node.slices.counts.hits == 39
    assert len(world.store.requests) == 40


@pytest.mark.parametrize("slices", [8, 64, pytest.param(512, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("share", ["one", "eighth", "all"])
async def test_bytes_fetched_are_bytes_delivered(nursery, autojump_clock, slices, share):
    world = World()
    size = 4 * KIB
    ranks = {"one": [slices // 2], "eighth": list(range(slices // 8)), "all": list(range(slices))}[share]
    count = 12
    for _ in range(count):
        world.add_step([size + 7 * (number % 3) for number in range(slices)])
    node = await at_work(nursery, Node(world))
    for step in range(count):
        async with trio.open_nursery() as readers:
            for rank in ranks:
                readers.start_soon(node.read, step, rank)
    await quiet()
    counts = node.slices.counts
    assert counts.bytes_fetched <= 1.02 * counts.bytes_delivered
    assert counts.requests == count, "one GET for the neighbours of a step"


@pytest.mark.parametrize("size", [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 20 * MIB])
async def test_large_slices_cost_one_get_per_block(nursery, autojump_clock, size):
    world = world_of(3, *[size] * 2)
    node = await at_work(nursery, Node(world))
    for step in range(3):
        await node.read(step, 1)
    counts = node.slices.counts
    assert counts.requests == 3 * -(-size // BLOCK_BYTES)
    assert counts.bytes_fetched == counts.bytes_delivered == 3 * size


async def test_told_slices_are_there_before_the_first_open(nursery, autojump_clock):
    world = world_of(10, *[64 * KIB] * 8)
    node = await at_work(nursery, Node(world, hinted=indices(2, 3), start=Step(4), window=3))
    await quiet()
    assert [node.slices.holds(Step(step), SliceIndex(2)) for step in range(8)] == [False] * 4 + [True] * 3 + [False]
    assert len(world.store.requests) == 3


async def test_steps_committed_later_are_fetched_when_they_come(nursery, autojump_clock):
    world = World()
    world.add_step([MIB])
    node = await at_work(nursery, Node(world))
    await node.read(0, 0)
    world.add_step([MIB])
    node.prefetcher.note_frontier()
    await quiet()
    assert node.slices.holds(Step(1), SliceIndex(0))


async def test_ranks_that_open_one_after_another_are_learned_before_they_are_planned_for(nursery, autojump_clock):
    world = world_of(3, *[16 * KIB] * 64)
    node = await at_work(nursery, Node(world))
    for rank in range(64):
        await node.read(0, rank)
        await trio.sleep(0.005)
    await quiet()
    assert len(world.store.requests) == 64 + 2, "the steps after the first are one GET each"


async def test_window_0_fetches_nothing_ahead(nursery, autojump_clock):
    world = world_of(10, MIB)
    node = await at_work(nursery, Node(world, window=0))
    for step in range(5):
        await node.read(step, 0)
    await quiet()
    assert len(world.store.requests) == 5


async def test_prefetch_stops_at_the_budget_and_consumed_steps_leave_first(nursery, autojump_clock):
    world = world_of(20, 2 * MIB)
    node = await at_work(nursery, Node(world, memory_bytes=8 * MIB, window=10))
    for step in range(20):
        await node.read(step, 0)
        await quiet()
        assert node.slices.cache.pool.used + node.slices.cache.pool.pooled <= 8 * MIB
        if 0 < step < 17:
            assert all(node.slices.holds(Step(step + ahead), SliceIndex(0)) for ahead in (1, 2, 3))
    assert len(world.store.requests) == 20, "nothing was evicted unread"


async def test_demand_finds_a_connection_while_prefetches_hang(nursery, autojump_clock):
    world = world_of(40, MIB)
    node = await at_work(nursery, Node(world, window=30))
    await node.read(0, 0)
    world.store.behave = lambda number, offset, size: (
        60.0 if world.store.requests[number][0] != demanded else 0.0  # type: ignore[has-type]
    )
    demanded = world.entries[39].tgb.key
    await quiet()
    before = trio.current_time()
    await node.read(39, 0)
    assert trio.current_time() - before < 1


@pytest.mark.parametrize("error", [StoreUnreachableError, AbsentError, CorruptError, RefusedError])
async def test_an_index_that_cannot_be_loaded_delays_only_its_steps(nursery, autojump_clock, error):
    """Whatever the reason, it is nobody's error until somebody opens a file of those steps."""

    class LateIndex(World):
        loaded = False
        asked = 0

        def entry_if_loaded(self, step):
            return super().entry_if_loaded(step) if step < 3 or self.loaded else None

        async def entry(self, step):
            self.asked += 1
            if not self.loaded:
                raise error("the index")
            return self.entries[step]

    world = LateIndex()
    for _ in range(8):
        world.add_step([MIB])
    node = await at_work(nursery, Node(world, window=4))
    await node.read(0, 0)
    await quiet()
    assert [node.slices.holds(Step(step), SliceIndex(0)) for step in range(1, 5)] == [
        True, True, False, False,
    ]  # fmt: skip
    asked = world.asked
    await trio.sleep(5)
    # Once a second for the segment, not for each of its steps; a damaged one is left alone until somebody reads in it.
    assert world.asked - asked <= (0 if error is CorruptError else 5)
    world.loaded = True
    await node.read(1, 0)
    await trio.sleep(2)
    assert all(node.slices.holds(Step(step), SliceIndex(0)) for step in range(1, 5))


class Daemon(Node):
    """One of a mount's daemons: what it has primed, the page cache serves."""

    def __init__(self, world, pages, table):
        super().__init__(world)
        self.primer = Primer(self.slices, pages, table)

    async def run(self, *, task_status):
        async with trio.open_nursery() as nursery:
            await nursery.start(self.primer.run)
            await super().run(task_status=task_status)

    async def read(self, step, index):
        if (step, index) not in self.primer.primed:
            await super().read(step, index)
            return
        self.slices.open(self.world.entries[step], SliceIndex(index)).close()
        self.prefetcher.note_open(Step(step), SliceIndex(index))


@pytest.mark.parametrize(("steps", "size"), [(60, 64 * KIB), (6, 4 * BLOCK_BYTES + 1)], ids=["a block", "five blocks"])
async def test_the_next_daemon_fetches_nothing_again(tmp_path, monkeypatch, autojump_clock, steps, size):
    monkeypatch.setattr(page_cache, "resident_bytes", lambda _path, length: length)
    world = world_of(steps, size)
    world.store.behave = lambda *_: 0.3
    pages = Pages(tmp_path, world)
    state, under_way = State.fresh(), 0
    for first in range(0, steps, steps // 3):
        async with trio.open_nursery() as nursery:
            daemon = Daemon(world, pages, state.primed)
            daemon.primer.inherit()
            await nursery.start(lambda task_status, run=daemon.run: run(task_status=task_status))
            for step in range(first, first + steps // 3):
                await daemon.read(step, 0)
                await trio.sleep(0.2)
            under_way += world.store.running
            await daemon.slices.settle()
            nursery.cancel_scope.cancel()
    assert under_way
    assert len(world.store.requests) == steps * -(-size // BLOCK_BYTES)
    os.close(state.descriptor)


async def test_the_next_daemon_knows_what_readers_open_next(nursery, autojump_clock):
    world = world_of(400, 4 * KIB, 4 * KIB)
    old = await at_work(nursery, Node(world))
    for step in range(100, 148, 2):
        await old.read(step, 1)
        await trio.sleep(0.5)
    new = Node(world)
    new.prefetcher.inherit(taken(ReadersState, json.loads(json.dumps(asdict(old.prefetcher.state())))), {})
    await at_work(nursery, new)
    await quiet()
    assert len(new.slices.requested) == new.prefetcher.window > 30
    assert new.slices.requested == old.slices.requested


async def test_what_a_reader_waits_for_keeps_no_daemon(nursery, autojump_clock):
    world = world_of(3, BLOCK_BYTES)
    node = await at_work(nursery, Node(world, window=2))
    world.store.behave = lambda number, *_: 1000.0 if number == 0 else 2.0
    nursery.start_soon(node.read, 0, 0)
    await quiet()
    assert world.store.running == 3
    began = trio.current_time()
    await node.slices.settle()
    assert trio.current_time() - began < 10
    world.add_step([BLOCK_BYTES])
    await node.read(1, 0)
    await quiet()
    assert world.entries[3].tgb.key not in {key for key, *_ in world.store.requests}, "it is fetched ahead"
    node.slices.go_on()
    await quiet()
    assert world.entries[3].tgb.key in {key for key, *_ in world.store.requests}
