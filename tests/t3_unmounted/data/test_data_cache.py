"""Who leaves memory for whom: a table of slices and blocks, without a store."""

from __future__ import annotations

from data_doubles import World

from stepfs.data.blocks import State
from stepfs.data.buffers import Pool, size_class
from stepfs.data.cache.memory import Cache
from stepfs.data.cache.reading_order import ReadingOrder
from stepfs.data.counters import DataCounts
from stepfs.data.roles import Role
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
    held = cache.hold(WORLD.entries[step], SliceIndex(2))
    held.handles += 1
    cache.set_role(held, Role.OPEN)
    return held


def consume(cache, step):
    held = opened(cache, step)
    held.handles -= 1
    cache.set_role(held, Role.CONSUMED)


def new_cache(on_disk=()):
    return Cache(
        Pool(3 * size_class(1500 * KIB)), DataCounts(), on_disk=lambda held: held.entry.step in on_disk
    )


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
    cache.saved(cache.hold(WORLD.entries[2], SliceIndex(2)))
    assert not leases(cache, asking_block(cache, 4)), "two of three blocks are not saved"
    saved.add(1)
    cache.saved(cache.hold(WORLD.entries[1], SliceIndex(2)))
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
