"""The cache as a state machine: whatever happens in whatever order, the budget holds and pinned bytes stay."""

from __future__ import annotations

from data_doubles import World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepfs.data.blocks import State
from stepfs.data.buffers import Pool, size_class
from stepfs.data.cache.memory import Cache
from stepfs.data.counters import DataCounts
from stepfs.errors import CorruptError, StoreUnreachableError
from stepfs.format.ids import SliceIndex, Step

KIB = 1 << 10
MIB = 1 << 20
LIMIT = 6 * MIB
STEPS = 6
SLICES = 3
WORLD = World()


for _ in range(STEPS):
    WORLD.add_step([100 * KIB, 9 * MIB, 1500 * KIB])  # the second is two blocks, and does not fit at once


steps = st.integers(0, STEPS - 1)
slices = st.integers(0, SLICES - 1)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.cache = Cache(Pool(LIMIT), DataCounts(), on_disk=lambda _: False)
        self.limit = LIMIT
        self.queued = []
        self.fetching = []  # (block, buffer)
        self.pinned = []
        self.views = []

    @rule(step=steps, index=slices)
    def open(self, step, index):
        held = self.cache.hold(WORLD.entries[step], SliceIndex(index))
        self.cache.pin(held)
        self.pinned.append(held)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def close(self, data):
        held = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.cache.unpin(held)

    @rule(step=steps, indices=st.sets(slices, min_size=1))
    def plan(self, step, indices):
        self.cache.needed(Step(step))
        self.queued += self.cache.plan(WORLD.entries[step], [SliceIndex(index) for index in indices])

    @precondition(lambda self: self.queued)
    @rule(data=st.data(), waiting=st.booleans())
    def start(self, data, waiting):
        block = self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1)))
        if block.state is not State.QUEUED:
            return
        kept = self.pinned_ready()
        block.waiting = int(waiting and block.pinned)
        buffer = self.cache.lease(block.range.size, block)
        if not block.waiting:
            assert kept <= self.pinned_ready(), "a pinned block left though nobody was blocked"
        block.waiting = 0
        if buffer is None:
            self.queued.append(block)
        else:
            assert len(buffer.view()) == block.range.size
            block.state = State.FETCHING
            self.fetching.append((block, buffer))

    @precondition(lambda self: self.fetching)
    @rule(data=st.data(), outcome=st.sampled_from(["ready", "corrupt", "unreachable"]))
    def finish(self, data, outcome):
        block, buffer = self.fetching.pop(data.draw(st.integers(0, len(self.fetching) - 1)))
        if outcome == "ready" and block.state is State.FETCHING:
            self.cache.ready(block, buffer)
            return
        self.cache.pool.give(buffer)
        if block.state is State.FETCHING:
            self.cache.fail(block, CorruptError("x") if outcome == "corrupt" else StoreUnreachableError("x"))

    @rule()
    def look(self):
        """A reader's view on its way to the kernel, of any block."""
        for block in self.cache.blocks():
            if block.state is State.READY:
                self.views.append(block.buffer.view())
                break

    @rule()
    def looked(self):
        self.views.clear()

    @rule(step=steps)
    def forget_below(self, step):
        self.cache.forget_below(Step(step))
        for block in self.cache.blocks():
            assert block.pinned or block.step >= step or block.state in (State.FETCHING, State.FAILED)

    @rule(limit=st.integers(MIB, LIMIT))
    def shrink(self, limit):
        self.limit = limit
        self.cache.shrink(limit)

    @rule(size=st.integers(1, 3 * MIB))
    def charge(self, size):
        if self.cache.charge(size):
            self.cache.pool.discharge(size)

    def pinned_ready(self):
        return {block for block in self.cache.blocks() if block.pinned and block.state is State.READY}

    @invariant()
    def the_budget_holds(self):
        pool = self.cache.pool
        assert pool.used >= 0
        assert pool.used + pool.pooled <= LIMIT
        if (
            pool.used + pool.pooled > self.limit
        ):  # only after it shrank, and only by what cannot be taken back
            unpinned = [b for b in self.cache.blocks() if b.state is State.READY and not b.pinned]
            assert not unpinned or self.views
            assert pool.pooled == 0 or pool.used <= self.limit

    @invariant()
    def every_byte_is_accounted_for(self):
        held = sum(block.buffer.capacity for block in self.cache.blocks() if block.state is State.READY)
        flying = sum(buffer.capacity for _, buffer in self.fetching)
        if not self.views and not self.cache.pool.lingering:
            assert self.cache.pool.used == held + flying

    @invariant()
    def buffers_are_there_exactly_when_ready(self):
        for block in self.cache.blocks():
            assert (block.buffer is not None) == (block.state is State.READY)
            assert block.state is not State.DROPPED

    @invariant()
    def open_slices_are_in_the_table(self):
        for held in self.pinned:
            assert self.cache.get(*held.key) is held
            assert held.pins == self.pinned.count(held)


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


TestCacheMachine = CacheMachine.TestCase


def fetched(cache, step, index=2):
    entry = WORLD.entries[step]
    for block in cache.plan(entry, [SliceIndex(index)]):
        buffer = cache.lease(block.range.size, block)
        assert buffer is not None
        block.state = State.FETCHING
        cache.ready(block, buffer)


def held_steps(cache):
    return sorted({block.step for block in cache.blocks() if block.state is State.READY})


def consume(cache, step):
    held = cache.hold(WORLD.entries[step], SliceIndex(2))
    cache.pin(held)
    cache.unpin(held)


def new_cache(on_disk=()):
    return Cache(
        Pool(3 * size_class(1500 * KIB)), DataCounts(), on_disk=lambda held: held.entry.step in on_disk
    )


def asking_block(cache, step, *, pinned=False, waiting=False):
    if pinned:
        cache.pin(cache.hold(WORLD.entries[step], SliceIndex(2)))
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
    cache.evictable.low = Step(3)
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
        cache.pin(cache.hold(WORLD.entries[step], SliceIndex(2)))
    for block in cache.blocks():
        block.read_at = {1: 5.0, 2: 1.0, 3: 9.0}[block.step]
    cache.pin(cache.hold(WORLD.entries[4], SliceIndex(2)))
    (asking,) = cache.plan(WORLD.entries[4], [SliceIndex(2)])
    assert cache.lease(asking.range.size, asking) is None, "an open file nobody reads waits"
    asking.waiting = 1
    assert cache.lease(asking.range.size, asking) is not None
    assert held_steps(cache) == [1, 3]


def test_a_prefetch_from_the_store_displaces_nearer_blocks_that_are_on_disk():
    cache = new_cache(on_disk={1, 2, 3})
    for step in (1, 2, 3):
        fetched(cache, step)
    cache.evictable.low = Step(1)
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
    cache.pin(block.owners[0])
    assert not leases(cache, block)
    block.waiting = 1
    assert leases(cache, block)
    assert held_steps(cache) == [3, 4]
