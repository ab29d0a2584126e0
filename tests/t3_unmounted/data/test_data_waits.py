"""Why readers waited: with one reader the causes sum to what a loop around `open` and `read` measures, in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest
import trio
import trio.testing
from at_work import at_work, until
from data_doubles import LAKE_ID, HeldStore, World, read_all, world_of
from faketable import FakeTable

from stepfs.data.blocks import CachedSlice
from stepfs.data.circuit_breaker import Attempt
from stepfs.data.disk_cache import DiskCache
from stepfs.data.slices import Slices
from stepfs.data.waiting import Cause, Ledger
from stepfs.errors import StoreUnreachableError
from stepfs.follow.changes import Changes
from stepfs.follow.waits import WaitOutcome, Waits
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step
from stepfs.view.tree import Tree, ViewOptions

MIB = 1 << 20
FIRST = SliceIndex(0)


def judged(ledger: Ledger, outside_s: float, cause: Cause) -> None:
    """The sums are what was measured outside, within 5 %, and at least 95 % of them are of this cause."""
    sums = ledger.sums()
    total = sum(sums["seconds"].values())
    assert total == pytest.approx(outside_s, rel=0.05)
    assert sums["seconds"][cause] >= 0.95 * total, sums
    assert sums["blocked_s"] == pytest.approx(outside_s, rel=0.05)


async def outside_s(slices: Slices, world: World, steps: range, work_s: float = 0.0) -> float:
    """Seconds that a loop spent in `open` and `read`, beside its work."""
    spent = 0.0
    for step in steps:
        began = trio.current_time()
        handle = slices.open(world.entries[step], FIRST)
        assert await read_all(handle) == world.payloads[step][0]
        spent += trio.current_time() - began
        await trio.sleep(work_s)
        handle.close()
    return spent


async def test_a_slow_store(nursery, autojump_clock):
    world = world_of(20, 3 * MIB)
    world.store.behave = lambda number, *_: 0.3 if number % 4 else 1.1
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    judged(slices.ledger, await outside_s(slices, world, range(20), 0.1), Cause.STORE)


async def test_a_slow_store_behind_reading_ahead(nursery, autojump_clock):
    """Most of the wait is over before the reader comes: what is left is the store's all the same."""
    world = world_of(20, 2 * BLOCK_BYTES)
    world.store.behave = lambda *_: 0.8
    slices = await at_work(nursery, Slices(world.store, memory_bytes=512 * MIB))
    slices.request((entry, [FIRST]) for entry in world.entries)
    judged(slices.ledger, await outside_s(slices, world, range(20)), Cause.STORE)


@pytest.mark.parametrize(("throttles", "cause"), [(True, Cause.THROTTLED), (False, Cause.UNREACHABLE)])
async def test_a_store_that_sends_requests_away_or_does_not_answer(nursery, autojump_clock, throttles, cause):
    world = world_of(4, MIB)

    def behave(number: int, _offset: int, _size: int) -> float:
        if number % 6 == 5:
            return 0.05
        world.store.counts.throttled += throttles
        raise StoreUnreachableError("away")

    world.store.behave = behave
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    judged(slices.ledger, await outside_s(slices, world, range(4)), cause)


async def test_a_store_whose_retries_make_throttling_good(nursery, autojump_clock):
    world = world_of(4, MIB)

    def behave(*_: int) -> float:
        world.store.counts.throttled += 1
        return 2.0

    world.store.behave = behave
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    judged(slices.ledger, await outside_s(slices, world, range(4)), Cause.THROTTLED)


async def test_a_far_place(nursery, autojump_clock):
    world = world_of(10, MIB)
    place = HeldStore()
    place.objects = dict(world.store.objects)
    place.behave = lambda *_: 0.7
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB, near=place))
    judged(slices.ledger, await outside_s(slices, world, range(10)), Cause.NEAR)


async def test_a_place_without_the_data_is_not_what_is_slow(nursery, autojump_clock):
    world = world_of(10, MIB)
    place = HeldStore()
    place.behave = lambda *_: 0.01
    world.store.behave = lambda *_: 0.7
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB, near=place))
    judged(slices.ledger, await outside_s(slices, world, range(10)), Cause.STORE)


async def test_memory_for_one_step_where_two_would_not_wait(nursery, autojump_clock):
    """The next step is fetched while this one is trained on, if there is room for both."""
    for memory, waits in ((1, True), (4, False)):
        world = world_of(12, BLOCK_BYTES)
        world.store.behave = lambda *_: 0.3
        slices = await at_work(nursery, Slices(world.store, memory_bytes=memory * BLOCK_BYTES))
        slices.request((entry, [FIRST]) for entry in world.entries)
        await trio.sleep(10)
        spent = await outside_s(slices, world, range(12), 1.0)
        assert (spent > 0) is waits
        if waits:
            judged(slices.ledger, spent, Cause.MEMORY)


@pytest.mark.logs("step 0 has waited .* for memory")
async def test_memory_that_others_hold(nursery, autojump_clock):
    world = world_of(1, 20 * MIB)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=18 * MIB, deadline_s=1000.0))
    handle = slices.open(world.entries[0], FIRST)
    views = [await handle.read(offset, MIB) for offset in range(0, 16 * MIB, MIB)]
    before = slices.ledger.sums()["seconds"]
    world.store.behave = lambda *_: 0.2

    async def let_go() -> None:
        await trio.sleep(30)
        views.clear()

    nursery.start_soon(let_go)
    await handle.read(16 * MIB, MIB)
    after = slices.ledger.sums()["seconds"]
    assert after[Cause.MEMORY] - before[Cause.MEMORY] == pytest.approx(30.2, rel=0.05)
    assert after[Cause.STORE] == before[Cause.STORE]


async def test_a_reader_that_nobody_could_foresee_does_not_blame_memory(nursery, autojump_clock):
    """Memory is full of guesses, and the loader short of more: what is read comes at once in their place."""
    world = world_of(40, BLOCK_BYTES)
    world.store.behave = lambda *_: 0.3
    slices = await at_work(nursery, Slices(world.store, memory_bytes=4 * BLOCK_BYTES))
    slices.request((entry, [FIRST]) for entry in world.entries[:20])
    await trio.sleep(100)
    spent = 0.0
    for step in range(39, 25, -1):
        spent += await outside_s(slices, world, range(step, step + 1), 1.0)
    judged(slices.ledger, spent, Cause.STORE)


@pytest.fixture
def on_disk(tmp_path) -> World:
    """Three steps that a daemon before has left in the cache at `tmp_path`."""
    world = world_of(3, MIB)

    async def fill() -> None:
        with closing(DiskCache(tmp_path, LAKE_ID, limit=64 * MIB)) as disk:
            slices = Slices(world.store, memory_bytes=64 * MIB, disk=disk)
            async with trio.open_nursery() as nursery:
                await nursery.start(slices.run)
                slices.request((entry, [FIRST]) for entry in world.entries)
                await until(lambda: len([*disk.path.glob("*.slice")]) == 3)
                nursery.cancel_scope.cancel()

    trio.run(fill)
    return world


async def test_a_slow_cache_disk(on_disk, nursery, autojump_clock, tmp_path, monkeypatch):
    slices = await at_work(
        nursery, Slices(on_disk.store, memory_bytes=64 * MIB, disk=DiskCache(tmp_path, LAKE_ID, limit=64 * MIB))
    )

    async def slow(owner: CachedSlice, offset: int, attempt: Attempt) -> None:
        await trio.sleep(0.6)
        view = attempt.buffer.view()
        view[:] = on_disk.payloads[owner.entry.step][0][offset : offset + len(view)]
        attempt.got = len(view)

    monkeypatch.setattr(slices.disk_copies, "load", slow)
    judged(slices.ledger, await outside_s(slices, on_disk, range(3)), Cause.DISK)
    assert slices.counts.disk_hits == 3


async def test_several_readers_are_added_up_and_their_common_time_counts_once(nursery, autojump_clock):
    world = world_of(1, *[MIB] * 4)
    world.store.behave = lambda *_: 2.0
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handles = [slices.open(world.entries[0], SliceIndex(index)) for index in range(4)]
    async with trio.open_nursery() as ranks:
        for handle in handles:
            ranks.start_soon(read_all, handle)
        await trio.sleep(1)
        sums = slices.ledger.sums()
        assert (sums["seconds"]["store"], sums["count"]["store"], sums["blocked_s"]) == (4.0, 4, 1.0), "while they wait"
    sums = slices.ledger.sums()
    assert sums["count"]["store"] == 4
    assert sums["seconds"]["store"] == pytest.approx(8, rel=0.05)
    assert sums["blocked_s"] == pytest.approx(2, rel=0.05)


async def test_a_read_that_finds_its_bytes_is_no_wait(nursery, autojump_clock):
    world = world_of(1, 3 * BLOCK_BYTES)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handle = slices.open(world.entries[0], FIRST)
    await read_all(handle)
    count = sum(slices.ledger.sums()["count"].values())
    await handle.read(BLOCK_BYTES - 5, 10)  # of two blocks
    await handle.read(5, 10)
    assert sum(slices.ledger.sums()["count"].values()) == count


async def test_a_read_from_memory_makes_as_many_calls_as_before_there_were_causes(nursery, autojump_clock):
    """Modules and functions on the way of a read that finds its bytes: the price of each request of each rank."""
    world = world_of(1, MIB)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handle = slices.open(world.entries[0], FIRST)
    await read_all(handle)
    calls = []

    def note(frame, event, _argument):
        if event == "call":
            calls.append((frame.f_globals["__name__"], frame.f_code.co_name))

    reading = handle.read(0, 4096)
    sys.setprofile(note)
    try:
        with pytest.raises(StopIteration):
            reading.send(None)
    finally:
        sys.setprofile(None)
    ours = [call for call in calls if call[0].startswith("stepfs")]
    assert {module for module, _ in ours} <= {"stepfs.data.slices", "stepfs.data.blocks", "stepfs.data.buffers"}
    assert len(ours) <= 6, ours


class Late:
    """The machine's clock, beside the virtual one: what a stopped process does not see of it."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def now(self) -> float:
        return trio.current_time() + self.skipped_s


async def late_by(seconds: float, act: Callable[[int], Awaitable[None]]) -> Ledger:
    """A loop that stands still for so long, once; `act` is called with the number of each tenth of a second."""
    clock, ledger, answered = Late(), Ledger(), [0]
    ledger.pulse.now = clock.now
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ledger.watch, lambda: answered[0])
        for tenth in range(40):
            if tenth == 20:
                clock.skipped_s += seconds
            answered[0] += 1
            await act(tenth)
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    return ledger


async def test_a_stopped_daemon_is_named_within_a_beat(autojump_clock):
    async def nothing(_tenth: int) -> None:
        return None

    sums = (await late_by(3.0, nothing)).sums()
    assert sums["count"]["daemon"] == 1
    assert 2.9 <= sums["seconds"]["daemon"] <= 3.1, "no more than the gap, and less by a beat at most"
    assert sums["blocked_s"] == pytest.approx(sums["seconds"]["daemon"])
    assert sum((await late_by(0.01, nothing)).sums()["count"].values()) == 0, "a healthy loop is a little late"


async def test_a_loop_that_is_late_while_a_reader_waits_counts_once(autojump_clock):
    clock, ledger = Late(), Ledger()
    ledger.pulse.now = clock.now
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ledger.watch, lambda: 1)
        await trio.sleep(1.05)
        with ledger.waiting("data", 0) as wait, wait.on(dict):
            await trio.sleep(0.1)
            clock.skipped_s += 5.0
            await trio.sleep(0.1)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    sums = ledger.sums()
    assert sums["count"] == {**dict.fromkeys(Cause, 0), "daemon": 1}
    assert 3.9 <= sums["seconds"]["daemon"] <= 5.3


async def test_slow_producers_and_then_a_store_that_is_away(autojump_clock):
    """Who waits for a commit waits for the producers, unless nobody could see one."""
    table, changes, away = FakeTable(slices=1), Changes(), [0.0]
    tree = Tree(table, ViewOptions(range(9)))
    waits = Waits(tree, table, changes, deadline_s=300.0, away_s=lambda: away[0])
    async with trio.open_nursery() as nursery:
        await nursery.start(waits.run)

        async def commits() -> None:
            for seconds in (7.0, 9.0):
                await trio.sleep(seconds)
                away[0] += 8.0 if seconds == 9.0 else 0.0
                table.commit(1)
                changes.notify()

        nursery.start_soon(commits)
        began = trio.current_time()
        await waits.for_files(Step(0), 1)
        assert waits.waiting_for is None
        judged(waits.ledger, trio.current_time() - began, Cause.COMMIT)
        await waits.for_files(Step(1), 1)
        sums = waits.ledger.sums()
        assert (sums["seconds"]["commit"], sums["seconds"]["unreachable"]) == (7.0, 9.0)
        waits.deadline_s = 20.0
        async with trio.open_nursery() as ranks:
            for _ in range(8):
                ranks.start_soon(waits.for_files, Step(2), 1)
            await trio.sleep(1)
            assert waits.waiting_for == "waiting for step 2; 2 are committed; no producer is known"
        assert await waits.for_commit(Step(2), 1) is WaitOutcome.EXPIRED
        (refused,) = waits.refused
        assert (refused.step, refused.error) == (2, "ETIMEDOUT")
        assert refused.why == "waited 20 s in vain: step 2 was not committed; 2 are committed; no producer is known"
        nursery.cancel_scope.cancel()
