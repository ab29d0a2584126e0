"""Who leaves memory for whom: a table of slices and blocks, and the roles of a slice one by one, without a store."""

from __future__ import annotations

from functools import cache

import pytest
from at_work import at_work
from data_doubles import World

from stepfs.data.blocks import NEXT, Role, State
from stepfs.data.buffers import Pool, size_class
from stepfs.data.counters import DataCounts
from stepfs.data.memory_cache import Cache, EvictionOrder, ReadingOrder
from stepfs.data.slices import Slices
from stepfs.format.ids import SliceIndex, Step

KIB = 1 << 10
WORLD = World()


for _ in range(6):
    WORLD.add_step([0, 0, 1500 * KIB])


def fetched(cache, step, index=2):
    entry = WORLD.entries[step]
    for block in cache.plan(entry, [SliceIndex(index)]):
        buffer = cache.lease(block.range.size, block)
        assert buffer is not None
        block.state = State.FETCHING
        cache.ready(block, buffer)


def held_steps(cache):
    return sorted({block.step for block in cache.blocks() if block.state is State.READY})


def opened(cache, step):
    held = cache.get_or_add(WORLD.entries[step], SliceIndex(2))
    held.handles += 1
    cache.set_role(held, Role.OPEN)
    return held


def consume(cache, step):
    held = opened(cache, step)
    held.handles -= 1
    cache.set_role(held, Role.CONSUMED)


def new_cache(on_disk=()):
    return Cache(Pool(3 * size_class(1500 * KIB)), DataCounts(), on_disk=lambda held: held.entry.step in on_disk)


def asking_block(cache, step, *, pinned=False, waiting=False):
    if pinned:
        opened(cache, step)
    (block,) = cache.plan(WORLD.entries[step], [SliceIndex(2)])
    block.waiting = int(waiting)
    return block


def leases(cache, block):
    return cache.lease(block.range.size, block) is not None


def test_consumed_steps_leave_first_then_passed_over_then_the_farthest():
    cache = new_cache()
    for step in (2, 3, 5):
        fetched(cache, step)
    consume(cache, 3)
    fetched(cache, 4)
    assert held_steps(cache) == [2, 4, 5]
    cache.evictable.order = ReadingOrder(low=Step(3))
    fetched(cache, 3)
    assert held_steps(cache) == [3, 4, 5]
    fetched(cache, 2)
    assert held_steps(cache) == [2, 3, 4]


def test_a_prefetch_never_displaces_what_is_read_sooner():
    cache = new_cache()
    for step in (1, 2, 3):
        fetched(cache, step)
    (block,) = cache.plan(WORLD.entries[4], [SliceIndex(2)])
    assert cache.lease(block.range.size, block) is None
    assert held_steps(cache) == [1, 2, 3]


def test_a_blocked_reader_takes_the_least_recently_read_pinned_block_as_last_resort():
    cache = new_cache()
    for step in (1, 2, 3):
        fetched(cache, step)
        opened(cache, step)
    for block in cache.blocks():
        block.read_at = {1: 5.0, 2: 1.0, 3: 9.0}[block.step]
    opened(cache, 4)
    (asking,) = cache.plan(WORLD.entries[4], [SliceIndex(2)])
    assert cache.lease(asking.range.size, asking) is None, "an open file nobody reads waits"
    asking.waiting = 1
    assert cache.lease(asking.range.size, asking) is not None
    assert held_steps(cache) == [1, 3]


def test_the_farthest_of_thousands_is_found_without_ranking_each():
    """It is asked for at each wake of the loader while a block waits for memory."""
    ranked = []

    class Counting(ReadingOrder):
        def distance(self, step):
            ranked.append(step)
            return super().distance(step)

    class Ahead:
        role = Role.WANTED

        def __init__(self, step):
            self.step = Step(step)

    evictable = EvictionOrder()
    for step in range(1000):
        evictable.add(Ahead(step))
    evictable.order = Counting(map(Step, range(1001)))
    assert evictable.pop_copied(lambda _: True, beyond=(0, 1000)) is None
    assert evictable.pop_farthest(beyond=(0, 1000)) is None
    assert evictable.pop_farthest(beyond=(0, 500)).step == 999
    assert len(ranked) <= 3


def test_a_prefetch_from_the_store_displaces_nearer_blocks_that_are_on_disk():
    cache = new_cache(on_disk={1, 2, 3})
    for step in (1, 2, 3):
        fetched(cache, step)
    cache.evictable.order = ReadingOrder([Step(1)])
    assert leases(cache, asking_block(cache, 4))
    assert held_steps(cache) == [1, 2]


def test_it_does_not_run_ahead_of_the_disk():
    saved = set()
    cache = new_cache(on_disk=saved)
    for step in (1, 2, 3):
        fetched(cache, step)
    saved.add(2)
    cache.saved(cache.get_or_add(WORLD.entries[2], SliceIndex(2)))
    assert not leases(cache, asking_block(cache, 4)), "two of three blocks are not saved"
    saved.add(1)
    cache.saved(cache.get_or_add(WORLD.entries[1], SliceIndex(2)))
    assert leases(cache, asking_block(cache, 5))
    assert held_steps(cache) == [1, 3]


def test_what_is_on_disk_does_not_displace_what_is_not_unless_a_reader_is_blocked():
    """Loads for nearer steps pushed out what was fetched and not saved yet: it was fetched twice."""
    cache = new_cache(on_disk={1})
    for step in (3, 4, 5):
        fetched(cache, step)
    block = asking_block(cache, 1)
    assert not leases(cache, block)
    opened(cache, 1)
    assert not leases(cache, block)
    block.waiting = 1
    assert leases(cache, block)
    assert held_steps(cache) == [3, 4]


MIB = 1 << 20


@cache
def world():
    made = World()
    made.add_step([MIB, 20 * MIB])
    return made


async def test_a_slice_that_does_not_fit_is_passed_while_it_is_read_in_order(nursery, autojump_clock):
    slices = await at_work(nursery, Slices(world().store, memory_bytes=18 * MIB))
    handle = slices.open(world().entries[0], SliceIndex(1))
    held = handle._held
    for offset in range(0, handle.length, MIB):
        assert held.role in (Role.OPEN, Role.BEHIND)
        await handle.read(offset, MIB)
    assert held.role is Role.BEHIND
    handle.close()
    assert held.role is Role.CONSUMED


@pytest.mark.parametrize("role", Role)
def test_only_what_the_table_names_may_follow_a_role(role):
    for other in Role:
        table = Cache(Pool(18 * MIB), DataCounts(), on_disk=lambda _: False)
        held = table.get_or_add(world().entries[0], SliceIndex(0))
        held.handles, held.role = 1, role
        if other is role or other in NEXT[role]:
            table.set_role(held, other)
            assert held.role is other
        else:
            with pytest.raises(AssertionError, match=f"{role.name} → {other.name}"):
                table.set_role(held, other)
