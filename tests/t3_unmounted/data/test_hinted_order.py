"""An announced order is fetched ahead like one step after the other, and nothing else about the mount changes."""

from __future__ import annotations

import errno
import random
from collections import OrderedDict

import pyfuse3
import pytest
import trio
from at_work import at_work
from data_doubles import indices
from test_data_prefetch import KIB, MIB, Node, quiet
from test_random_order import lake, read_all

from stepfs.data.announced_orders import ShuffledOrder, ShuffleHint, StepsHint, shuffle_name
from stepfs.errors import StoreUnreachableError
from stepfs.format.ids import Step
from stepfs.mount.fuse.control import take_hint


def shuffled(steps, *, epoch=0, shard=0, shards=1):
    return ShuffledOrder(11, epoch, Step(0), Step(steps), shard, shards)


async def share_of_hits(nursery, order, hint, *, at_once=8, memory_bytes=64 * MIB, slices=(0,)):
    world = lake(3000, 2)
    world.store.behave = lambda *_: 0.01
    node = await at_work(nursery, Node(world, memory_bytes=memory_bytes))
    if hint is not None:
        node.prefetcher.accept(hint)
    await read_all(node, order, at_once=at_once, slices=slices)
    world.store.behave = lambda *_: 0.0
    return node.slices.counts


@pytest.mark.parametrize(
    ("at_once", "memory_bytes"),
    [(8, 64 * MIB), (8, MIB), (1, MIB), pytest.param(1, 64 * MIB, marks=pytest.mark.nightly)],
)
async def test_an_announced_order_hits_like_a_sequential_one(nursery, autojump_clock, at_once, memory_bytes):
    order = shuffled(3000)
    options = {"at_once": at_once, "memory_bytes": memory_bytes}
    random_order = [order.step_at(place) for place in range(200)]
    plain = await share_of_hits(nursery, range(200), None, **options)
    hinted = await share_of_hits(nursery, random_order, ShuffleHint(order, 0), **options)
    assert hinted.hits >= 0.95 * plain.hits
    assert plain.hits >= 150
    assert hinted.bytes_delivered == 200 * 4 * KIB
    # What is ahead when the reader stops, and never more than memory holds.
    ahead = min(memory_bytes, 1024 * 4 * KIB)
    assert hinted.bytes_fetched <= 1.05 * hinted.bytes_delivered + ahead


async def test_a_whole_epoch_fetches_each_step_once(nursery, autojump_clock):
    world = lake(400, 2)
    node = await at_work(nursery, Node(world, memory_bytes=1 * MIB))
    for epoch in range(2):
        order = shuffled(400, epoch=epoch)
        node.prefetcher.accept(ShuffleHint(order, 0))
        await read_all(node, [order.step_at(place) for place in range(400)], at_once=4, slices=(0, 1))
    counts = node.slices.counts
    assert counts.bytes_fetched <= 1.05 * counts.bytes_delivered
    assert counts.hits >= 0.95 * 1600


async def test_a_window_beyond_the_budget_fetches_each_step_once(nursery, autojump_clock):
    """Evicted by number, the steps that came next left for others: everything was fetched three times."""
    node = Node(lake(400, 2), memory_bytes=512 * KIB, window=300, hinted=indices(0, 1))
    order = shuffled(400)
    node.prefetcher.accept(ShuffleHint(order, 0))
    await nursery.start(node.run)
    await read_all(node, [order.step_at(place) for place in range(400)], at_once=4, slices=(0, 1))
    counts = node.slices.counts
    assert counts.bytes_fetched == counts.bytes_delivered
    assert counts.hits >= 0.95 * 800
    nursery.cancel_scope.cancel()


async def test_steps_fetched_before_an_order_was_announced_make_room_for_it(nursery, autojump_clock):
    node = Node(lake(400, 1), memory_bytes=16 * 4 * KIB, window=16, hinted=indices(0))
    await nursery.start(node.run)
    await quiet()
    assert node.slices.holds(Step(0), 0)
    node.prefetcher.accept(StepsHint(0, tuple(map(Step, range(300, 390)))))
    await quiet()
    assert all(node.slices.holds(Step(step), 0) for step in range(300, 312))
    nursery.cancel_scope.cancel()


async def test_a_block_that_waited_for_memory_does_not_hold_up_a_new_order_that_ends_with_it(nursery, autojump_clock):
    node = Node(lake(400, 1), memory_bytes=16 * 4 * KIB, window=40, hinted=indices(0))
    await nursery.start(node.run)
    await quiet()
    assert node.slices.holds(Step(15), 0)
    node.prefetcher.accept(StepsHint(0, tuple(map(Step, [*range(300, 316), *range(17)]))))
    await quiet()
    assert all(node.slices.holds(Step(step), 0) for step in range(300, 316))


async def test_steps_that_the_next_epoch_reads_soon_stay_though_they_were_read(nursery, autojump_clock):
    """Read ones left first, oldest first: of a lake a little larger than memory each epoch fetched everything."""
    node = await at_work(nursery, Node(lake(40, 1), memory_bytes=32 * 4 * KIB, hinted=indices(0)))
    for epoch in range(4):
        order = shuffled(40, epoch=epoch)
        node.prefetcher.accept(ShuffleHint(order, 0))
        await read_all(node, [order.step_at(place) for place in range(40)])
    counts = node.slices.counts
    assert counts.bytes_fetched <= 0.5 * counts.bytes_delivered
    assert counts.hits >= 155


async def test_a_listed_order_is_as_good(nursery, autojump_clock):
    steps = random.Random(4).sample(range(3000), 300)
    counts = await share_of_hits(nursery, steps, StepsHint(0, tuple(map(Step, steps))))
    assert counts.hits >= 0.9 * len(steps)  # readers start at once, and nobody knows which slices
    assert counts.bytes_fetched <= 1.02 * counts.bytes_delivered


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.nightly), 8])
@pytest.mark.parametrize("drawn", ["two epochs", "with replacement"])
async def test_an_order_with_repeated_steps_is_as_good(nursery, autojump_clock, drawn, at_once):
    draw = random.Random(4)
    steps = [Step(draw.randrange(600)) for _ in range(800)]
    if drawn == "two epochs":
        steps = [Step(step) for _ in range(2) for step in draw.sample(range(400), 400)]
    counts = await share_of_hits(nursery, steps, StepsHint(0, tuple(steps)), at_once=at_once, memory_bytes=1 * MIB)
    assert counts.hits >= 0.95 * len(steps)
    assert counts.bytes_fetched <= 1.02 * counts.bytes_delivered


async def test_a_wrong_hint_costs_a_window_and_no_bytes_differ(nursery, autojump_clock):
    """`read` compares what it reads. A trainer that does not do what it said is served like any other."""
    counts = await share_of_hits(nursery, range(2800, 3000), ShuffleHint(shuffled(1000), 0), at_once=1)
    assert counts.hits >= 190
    assert counts.bytes_fetched <= 1.2 * counts.bytes_delivered


async def test_prefetch_0_ignores_hints(nursery, autojump_clock):
    node = await at_work(nursery, Node(lake(400, 2), window=0, hinted=indices(0)))
    node.prefetcher.accept(ShuffleHint(shuffled(400), 0))
    await quiet()
    assert node.slices.counts.requests == 0


async def test_an_index_that_cannot_be_read_now_is_read_later(nursery, autojump_clock, monkeypatch):
    world = lake(400, 2)
    asked = []

    async def lone_entry(step):
        asked.append(step)
        raise StoreUnreachableError("the index")

    monkeypatch.setattr(world, "entry_if_loaded", lambda step: world.entries[step] if step < 200 else None)
    monkeypatch.setattr(world, "lone_entry", lone_entry)
    node = await at_work(nursery, Node(world, window=20, hinted=indices(0)))
    order = shuffled(400)
    node.prefetcher.accept(ShuffleHint(order, 0))
    await trio.sleep(5)
    ahead = [order.step_at(place) for place in range(20)]
    assert set(asked) == {step for step in ahead if step >= 200}
    assert len(asked) <= 7 * len(set(asked)), "once a second"
    assert all(node.slices.holds(step, 0) for step in ahead if step < 200)


async def test_a_plan_beyond_the_index_entries_that_are_kept_reads_none_twice(nursery, autojump_clock, monkeypatch):
    """Of a lake with thousands of slices a step few entries are kept: they displaced each other, request after request."""
    world, kept, asked = lake(400, 2), OrderedDict(), []

    def entry_if_loaded(step):
        if step in kept:
            kept.move_to_end(step)
        return kept.get(step)

    async def lone_entry(step):
        asked.append(step)
        await trio.sleep(0.001)
        kept[step] = world.entries[step]
        while len(kept) > world.lone_entries_max:
            kept.popitem(last=False)
        return world.entries[step]

    monkeypatch.setattr(world, "lone_entries_max", 100)
    monkeypatch.setattr(world, "entry_if_loaded", entry_if_loaded)
    monkeypatch.setattr(world, "lone_entry", lone_entry)
    node = await at_work(nursery, Node(world, window=300, hinted=indices(0)))
    order = shuffled(400)
    node.prefetcher.accept(ShuffleHint(order, 0))
    await trio.sleep(5)
    assert asked == [order.step_at(place) for place in range(len(asked))]
    assert 50 <= len(asked) <= 100
    assert all(node.slices.holds(step, 0) for step in asked)


class Taker:
    def __init__(self):
        self.hints = []

    def accept(self, hint):
        self.hints.append(hint)


def test_only_root_and_who_mounted_may_give_hints(monkeypatch):
    monkeypatch.setattr("os.getuid", lambda: 1000)
    taker = Taker()
    name = shuffle_name(shuffled(10), 0).encode()
    for uid in (0, 1000):
        take_hint(taker, name, uid)
    assert len(taker.hints) == 2
    for uid in (1, 1001, 65534):
        with pytest.raises(pyfuse3.FUSEError) as refused:
            take_hint(taker, name, uid)
        assert refused.value.errno == errno.EACCES
    for bad in (b"", b"x", b"\xff", b"1-none-", name + b"0" * 20):
        with pytest.raises(pyfuse3.FUSEError) as refused:
            take_hint(taker, bad, 0)
        assert refused.value.errno == errno.ENOENT
    assert len(taker.hints) == 2
