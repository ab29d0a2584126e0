"""Opening steps in random order costs the bytes that are read, and readers in order keep what they had."""

from __future__ import annotations

import random
from functools import cache

import pytest
import trio
import trio.testing
from at_work import at_work
from data_doubles import indices, world_of
from test_data_prefetch import KIB, MIB, Node, quiet

from stepfs.data.access_pattern import AccessHistory, ordered_runs, plan_ahead
from stepfs.data.tuning import TUNING
from stepfs.format.ids import SliceIndex, Step

SIZE = 4 * KIB


@cache
def lake(steps, slices):
    return world_of(steps, *[SIZE] * slices)


async def read_all(node, order, *, at_once=1, slices=(0,)):
    """Readers that take the next step of one order, as the workers of a DataLoader do."""
    queue = iter(order)

    async def worker():
        for step in queue:
            async with trio.open_nursery() as ranks:
                for index in slices:
                    ranks.start_soon(node.read, step, index)
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(worker)
    await quiet()


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize(("steps", "count"), [(400, 40), (400, 300), (3000, 60), (3000, 400)])
async def test_random_order_fetches_what_is_read(nursery, autojump_clock, steps, count, at_once):
    world = lake(steps, 2)
    node = await at_work(nursery, Node(world, memory_bytes=64 * MIB))
    order = random.Random(count).sample(range(steps), count)
    await read_all(node, order, at_once=at_once)
    counts = node.slices.counts
    assert counts.bytes_delivered == len(order) * SIZE
    assert counts.bytes_fetched <= 1.05 * counts.bytes_delivered


async def test_random_order_is_planned_for_at_each_eighth_step(nursery, autojump_clock, monkeypatch):
    node = await at_work(nursery, Node(lake(3000, 2)))
    plans = []
    request = node.slices.request
    monkeypatch.setattr(node.slices, "request", lambda wanted: request(plans.append(wanted) or wanted))
    await read_all(node, random.Random(5).sample(range(3000), 400), slices=(0, 1))
    assert len(plans) <= 400 / 8 + 16, "some steps go on from another by chance"
    plans.clear()
    await read_all(node, range(1000, 1040))
    assert len(plans) >= 12, "in order again: not at each eighth step alone"
    assert node.slices.counts.misses <= 800 + 5, "as many as with a plan at each open"


@pytest.mark.parametrize("options", [{"hinted": indices(0, 1, 2, 3)}, {"window": 8}])
async def test_options_for_readers_in_order_cost_little_in_random_order(nursery, autojump_clock, options):
    world = lake(3000, 4)
    node = await at_work(nursery, Node(world, **options))
    order = random.Random(2).sample(range(3000), 300)
    for step in order:
        await node.read(step, step % 4)
        await trio.sleep(0.02)
    await quiet()
    assert node.slices.counts.bytes_fetched <= 1.05 * node.slices.counts.bytes_delivered


async def test_prefetch_0_means_none_in_any_order(nursery, autojump_clock):
    world = lake(400, 2)
    node = await at_work(nursery, Node(world, window=0))
    order = random.Random(1).sample(range(400), 200)
    await read_all(node, order, at_once=4)
    assert node.slices.counts.bytes_fetched == node.slices.counts.bytes_delivered


async def test_sixty_four_readers_that_take_turns_are_all_fetched_ahead_for(nursery, autojump_clock):
    """More readers than the steps after which a single one counts as gone; each round is over in one planning."""
    readers = TUNING.live_steps + 16
    world = lake(3000, 1)
    node = await at_work(nursery, Node(world, window=2))
    rounds = 6
    for number in range(rounds):
        async with trio.open_nursery() as turns:
            for reader in range(readers):
                turns.start_soon(node.read, 40 * reader + number, 0)
        await quiet()
    assert node.slices.counts.hits >= (rounds - 2) * readers


async def test_a_reader_in_order_keeps_its_hits_beside_random_ones(nursery, autojump_clock):
    """Training in order, and a validation job that jumps about in the same lake."""
    world = lake(3000, 2)
    node = await at_work(nursery, Node(world))
    jumps = random.Random(7).sample(range(3000), 80)
    missed = 0
    for number, jump in enumerate(jumps):
        before = node.slices.counts.misses
        await node.read(1000 + number, 0)
        missed += node.slices.counts.misses - before
        await trio.sleep(0.02)
        await node.read(jump, 1)
        await trio.sleep(0.02)
    assert missed <= 10


@pytest.mark.parametrize(
    ("start", "jitter"),
    [(0, 1), (1234, 16), *(pytest.param(*both, marks=pytest.mark.nightly) for both in ((0, 16), (1234, 1)))],
)
async def test_workers_that_run_ahead_of_each_other_are_in_order(nursery, autojump_clock, start, jitter):
    world = lake(3000, 1)
    node = await at_work(nursery, Node(world))
    rng = random.Random(5)
    order = sorted(range(start, start + 200), key=lambda step: step + rng.uniform(0, jitter))
    await read_all(node, order, at_once=2)
    counts = node.slices.counts
    assert counts.misses <= 12 + jitter
    assert counts.bytes_fetched <= 1.02 * counts.bytes_delivered + node.prefetcher.window * SIZE


def ordered(opens, *, frontier=10_000):
    """How many of the runs are in order, of how many."""
    position = AccessHistory()
    for step in opens:
        position.note(Step(step), SliceIndex(0))
    runs = position.runs()
    return len(ordered_runs(runs, position.order, first=Step(0), frontier=Step(frontier))), len(runs)


def test_what_counts_as_order():
    assert ordered([0]) == (1, 1), "where reading begins"
    assert ordered([5000]) == (0, 1), "anywhere else one step says nothing"
    assert ordered([5000, 5001]) == (1, 1)
    assert ordered(range(0, 80, 8)) == (1, 1), "a stride"
    assert ordered([0, 4, 1, 5, 2, 8, 6, 3, 9, 12]) == (1, 1), "forked workers"
    assert ordered([100, 7000, 300]) == (0, 3)
    assert ordered([0, 7000, 3000]) == (0, 3), "a jump ends the trust in the first step"
    shuffled = list(range(64))
    random.Random(5).shuffle(shuffled)
    assert ordered(shuffled[:44]) == (1, 1), "a shuffle window"
    assert ordered(shuffled[:44], frontier=63) == (0, 1), "the same is random order in a lake no larger"


@pytest.mark.parametrize("steps", [300, 1000, 3000, 30_000])
def test_random_steps_are_hardly_ever_taken_for_order(steps):
    """Pure, over many orders: what would be fetched ahead of readers that jump."""
    wasted = read = 0
    for seed in range(4):
        order = random.Random(seed).sample(range(steps), min(200, steps * 3 // 4))
        position, fetched = AccessHistory(), set()
        for step in order:
            position.note(Step(step), SliceIndex(0))
            frontier = Step(steps - 1)
            runs = ordered_runs(position.runs(), position.order, first=Step(0), frontier=frontier)
            ahead = plan_ahead(runs, position.opened, hinted=frozenset(), window=64, first=Step(0), frontier=frontier)
            fetched |= {step for step, _ in ahead}
        wasted += len(fetched - set(order))
        read += len(order)
    assert wasted <= 0.03 * read
