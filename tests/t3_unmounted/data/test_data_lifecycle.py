"""The life of slices as a state machine over `Slices`: whatever is opened, read, requested and closed in whatever order,
while GETs end well or badly, the budget holds, the bytes are right, and what a reader has open stays.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import trio
import trio.testing
from data_doubles import HeldStore, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stepfs.data.blocks import Role, State
from stepfs.data.slices import Slices
from stepfs.errors import StepfsError, StoreUnreachableError
from stepfs.format.ids import SliceIndex, Step
from stepfs.store.api import ignore_progress

KIB = 1 << 10
MIB = 1 << 20
LIMIT = 18 * MIB
SIZES = [100 * KIB, 20 * MIB, 1500 * KIB]  # the second is three blocks, and does not fit
STEPS = 5
WORLD = World()

for _ in range(STEPS):
    WORLD.add_step(SIZES)

steps = st.integers(0, STEPS - 1)
slices = st.integers(0, len(SIZES) - 1)


@dataclass
class Get:
    offset: int
    ended: trio.Event = field(default_factory=trio.Event)
    outcome: str = ""


class ToldStore(HeldStore):
    """Each GET waits until the machine says how it ends."""

    def __init__(self):
        super().__init__()
        self.objects = WORLD.store.objects
        self.gets = []

    async def read_into(self, key, offset, buffer, landed=ignore_progress):
        get = Get(offset)
        self.gets.append(get)
        try:
            await get.ended.wait()
        finally:
            self.gets.remove(get)
        if get.outcome == "unreachable":
            raise StoreUnreachableError("as told")
        data = self.objects[key][offset : offset + len(buffer)]
        buffer[: len(data)] = data
        if get.outcome == "corrupt":
            buffer[0] ^= 1
        landed(len(data))
        return len(data)


class Loop:
    """A trio loop in virtual time, in a thread of its own; each call returns once nothing in it can go on."""

    def __init__(self, store, *, kept):
        self.clock = trio.testing.MockClock()
        self.slices = Slices(store, memory_bytes=LIMIT, deadline_s=60.0, opened_are_kept=kept, peers=2)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: trio.run(self._main, clock=self.clock))
        self._thread.start()
        self._ready.wait()

    async def _main(self):
        async with trio.open_nursery() as self.nursery:
            await self.nursery.start(self.slices.run)
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await trio.sleep_forever()

    def call(self, function, *arguments):
        async def settled():
            result = function(*arguments)
            await trio.testing.wait_all_tasks_blocked()
            return result

        return trio.from_thread.run(settled, trio_token=self._token)

    def end(self):
        trio.from_thread.run_sync(self.nursery.cancel_scope.cancel, trio_token=self._token)
        self._thread.join()


class Reader:
    """One open file."""

    def __init__(self, handle, step, index):
        self.handle = handle
        self.payload = WORLD.payloads[step][index]
        self.waits = False

    async def read(self, offset, size, views):
        self.waits = True
        try:
            view = await self.handle.read(offset, size)
            assert view == self.payload[offset : offset + size]
            views.append(view)
        except StepfsError:
            pass  # as the machine told a GET to end
        finally:
            self.waits = False


class SlicesMachine(RuleBasedStateMachine):
    seen: ClassVar[set[Role]] = set()

    @initialize(kept=st.booleans())
    def begin(self, kept):
        self.kept = kept
        self.store = ToldStore()
        self.loop = Loop(self.store, kept=kept)
        self.slices = self.loop.slices
        self.cache = self.slices.cache
        self.readers = []
        self.views = []
        self.stayed = set()  # blocks of open slices, while nobody waited

    def teardown(self):
        self.loop.end()

    @rule(step=steps, index=slices)
    def open(self, step, index):
        handle = self.loop.call(self.slices.open, WORLD.entries[step], SliceIndex(index))
        self.readers.append(Reader(handle, step, index))

    @rule()
    def map_a_file_of_each_step(self):
        for step in range(STEPS):
            self.open(step, 2)
        self.stayed = set()  # one of them may have become idle, and was opened again

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), block=st.integers(0, 2), size=st.sampled_from([1, 64 * KIB, 9 * MIB]))
    def read(self, data, block, size):
        reader = data.draw(st.sampled_from(self.readers))
        offset = min(block * 8 * MIB, reader.handle.length - 1)
        self.loop.call(self.loop.nursery.start_soon, reader.read, offset, size, self.views)
        assert reader.handle._held.role.pinned

    @precondition(lambda self: any(not reader.waits for reader in self.readers))
    @rule(data=st.data())
    def close(self, data):
        reader = data.draw(st.sampled_from([reader for reader in self.readers if not reader.waits]))
        self.readers.remove(reader)
        self.loop.call(reader.handle.close)

    @rule()
    def close_all(self):
        for reader in [reader for reader in self.readers if not reader.waits]:
            self.readers.remove(reader)
            self.loop.call(reader.handle.close)

    @rule(requests=st.lists(st.tuples(steps, st.lists(slices, min_size=1, unique=True)), max_size=4))
    def request(self, requests):
        wanted = [(WORLD.entries[step], [SliceIndex(i) for i in sorted(chosen)]) for step, chosen in requests]
        keys = {(entry.step, index) for entry, indices in wanted for index in indices}
        idle = {held for held in self.held() if held.role is Role.IDLE}
        self.loop.call(self.slices.request, wanted)
        assert {held for held in idle if held.role is Role.WANTED} == {h for h in idle if h.key in keys}

    @precondition(lambda self: self.store.gets)
    @rule(data=st.data(), outcome=st.sampled_from(["whole", "whole", "whole", "corrupt", "unreachable"]))
    def end_get(self, data, outcome):
        get = data.draw(st.sampled_from(self.store.gets))
        get.outcome = outcome
        self.loop.call(get.ended.set)

    @precondition(lambda self: self.store.gets)
    @rule()
    def end_all_gets(self):
        while self.store.gets:
            for get in list(self.store.gets):
                get.outcome = "whole"
                self.loop.call(get.ended.set)

    @rule(seconds=st.sampled_from([0.5, 3.0, 70.0]))
    def pass_time(self, seconds):
        self.loop.call(self.loop.clock.jump, seconds)

    @rule()
    def send_views(self):
        """The kernel has what readers got."""
        self.views.clear()

    @rule(step=st.integers(0, 2))
    def forget_below(self, step):
        self.loop.call(self.slices.forget_below, Step(step))

    @rule()
    def retire_the_group(self):
        self.kept = False
        self.loop.call(self.slices.keep_opened)

    @rule(limit=st.integers(9, 18))
    def set_memory(self, limit):
        self.loop.call(self.slices.set_memory, limit * MIB)

    @rule(size=st.integers(1, 3 * MIB))
    def charge(self, size):
        if self.loop.call(self.cache.charge, size):
            self.loop.call(self.cache.pool.discharge, size)

    def held(self):
        owners = {owner for block in self.cache.blocks() for owner in block.owners}
        return owners.union(self.cache.opened())

    @invariant()
    def the_budget_holds(self):
        pool = self.cache.pool
        assert 0 <= pool.used <= pool.used + pool.pooled <= LIMIT

    @invariant()
    def every_byte_is_accounted_for(self):
        blocks = self.cache.blocks()
        if not self.store.gets and not self.views and not any(b.state is State.FETCHING for b in blocks):
            self.cache.pool.sweep()
            assert self.cache.pool.used == sum(b.buffer.capacity for b in blocks if b.state is State.READY)

    @invariant()
    def buffers_are_there_exactly_when_ready(self):
        for block in self.cache.blocks():
            assert (block.buffer is not None) == (block.state is State.READY)
            assert block.state is not State.DROPPED

    @invariant()
    def roles_are_those_of_open_and_closed_files(self):
        open_handles = {}
        for reader in self.readers:
            key = reader.handle._held.key
            open_handles[key] = open_handles.get(key, 0) + 1
        for held in self.held():
            self.seen.add(held.role)
            assert held.handles == open_handles.get(held.key, 0)
            if held.handles:
                assert held.role not in (Role.AWAITED, Role.CONSUMED)
                assert self.kept or held.role.pinned
            elif held.role is not Role.WANTED:
                awaited = held.key in self.slices._closes
                assert held.role is (Role.AWAITED if awaited else Role.CONSUMED)

    @invariant()
    def what_may_leave_is_filed_by_its_role(self):
        order = self.cache.evictable
        for block in self.cache.blocks():
            filed = {role for role, blocks in order._aside.items() if block in blocks}
            filed |= {Role.WANTED} if block in order._ahead.get(block.step, {}) else set()
            leaves = block.state is State.READY and not block.pinned
            assert filed == ({block.role} if leaves else set())

    @invariant()
    def what_is_open_stays_while_nobody_is_blocked(self):
        held = {h for h in self.held() if h.role is Role.OPEN}
        ready = {(h, place) for h in held for place in h.places if place and place.state is State.READY}
        calm = not any(reader.waits for reader in self.readers)
        if calm:
            gone = {h for h, _ in self.stayed - ready if h.role is Role.OPEN}
            assert not gone
        self.stayed = ready if calm else set()


@pytest.mark.logs("CRC32C|as told")
@pytest.mark.parametrize("examples", [40, pytest.param(120, marks=pytest.mark.nightly)])
def test_slices_in_every_role(examples):
    drawn = settings(max_examples=examples, stateful_step_count=40, deadline=None, derandomize=True)
    run_state_machine_as_test(SlicesMachine, settings=drawn)
    assert SlicesMachine.seen >= set(Role) - {Role.BEHIND}, "BEHIND takes reads in order: the next test"
