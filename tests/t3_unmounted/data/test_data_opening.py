"""Opening is not reading: a slice is wanted at its first READ, and open files that nobody reads make room."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from at_work import at_work, until
from data_doubles import processor, world_of, world_with
from data_pages import Pages

from stepfs.data import page_cache as prime_module
from stepfs.data.disk_cache import DiskCache
from stepfs.data.fetch import ConcurrencyLimit
from stepfs.data.page_cache import Primer
from stepfs.data.prefetch import Prefetcher
from stepfs.data.slices import Slices
from stepfs.format.ids import SliceIndex, Step

KIB = 1 << 10
MIB = 1 << 20
INDEX = SliceIndex(0)


class PrimedNode:
    """A mount with a page cache made of files. What is primed is read without a READ, as the kernel does it."""

    def __init__(self, tmp_path, monkeypatch, world, *, memory_bytes, kept):
        tmp_path.mkdir()
        self.world = world
        self.pages = Pages(tmp_path, world)
        self.slices = Slices(world.store, memory_bytes=memory_bytes, opened_are_kept=kept)
        monkeypatch.setattr(prime_module, "resident_bytes", lambda _path, length: length)
        monkeypatch.setattr(prime_module, "drop_pages", self.pages.dropped.append)
        self.primer = Primer(self.slices, self.pages)
        self.prefetcher = Prefetcher(self.slices, world, world)
        self.slices.on_reading = self.prefetcher.note_open

    async def run(self, *, task_status):
        async with trio.open_nursery() as nursery:
            for part in (self.slices, self.primer, self.prefetcher):
                await nursery.start(part.run)
            task_status.started()

    def primed(self, step):
        return (Step(step), INDEX) in self.primer.primed

    async def train(self, steps):
        """How many of the steps were primed when they were opened; waits a little for each, as a trainer does."""
        found = 0
        for step in steps:
            with trio.move_on_after(1.5):
                await until(lambda step=step: self.primed(step))
            found += self.primed(step)
            handle = self.slices.open(self.world.entries[step], INDEX)
            if not self.primed(step):
                await handle.read(0, 4096)
            handle.close()
        return found


@pytest.mark.parametrize("pace_s", [0.0, 0.002])
async def test_mapped_and_untouched_files_do_not_keep_the_next_steps_from_being_primed(
    nursery, tmp_path, monkeypatch, pace_s
):
    """400 files of 512 KiB in 64 MiB, scaled by four: `pace_s` apart, so that what is opened was primed, or was not."""
    world = world_of(500, 128 * KIB)
    primed = []
    for mapped in (0, 400):
        node = await at_work(
            nursery, PrimedNode(tmp_path / str(mapped), monkeypatch, world, memory_bytes=16 * MIB, kept=True)
        )
        handles = []
        for step in range(mapped):
            handles.append(node.slices.open(world.entries[step], INDEX))
            await trio.sleep(pace_s)
        primed.append(await node.train(range(400, 500)))
        assert node.slices.cache.pool.used <= 16 * MIB
        for handle in handles:
            handle.close()
    assert primed[1] >= primed[0] - 1
    assert primed[0] >= 98


async def test_opening_fetches_nothing_while_a_group_keeps_the_object_and_the_first_read_fetches_the_slice(
    nursery, autojump_clock
):
    world = world_of(1, 20 * MIB)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB, opened_are_kept=True))
    handle = slices.open(world.entries[0], INDEX)
    await trio.sleep(60)
    assert slices.counts.requests == 0
    assert bytes(await handle.read(0, 10)) == world.payloads[0][0][:10]
    await trio.testing.wait_all_tasks_blocked()
    assert slices.holds(Step(0), INDEX)
    assert (slices.counts.requests, slices.counts.bytes_fetched) == (3, 20 * MIB)


async def test_without_a_group_what_is_opened_is_fetched_and_stays(nursery, autojump_clock):
    world = world_of(60, MIB)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
    handles = [slices.open(world.entries[step], INDEX) for step in range(60)]
    await trio.sleep(60)
    assert slices.counts.requests == 60
    world.store.objects.clear()
    for step, handle in enumerate(handles):
        assert bytes(await handle.read(0, MIB)) == world.payloads[step][0]


@pytest.mark.parametrize("end", ["checkpoint", "retired"])
@pytest.mark.parametrize("read", [False, True])
async def test_idle_files_are_held_before_their_objects_may_go(nursery, autojump_clock, end, read):
    world = world_of(80, 256 * KIB)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=32 * MIB, opened_are_kept=True))
    handles = [slices.open(world.entries[step], INDEX) for step in range(40)]
    if read:
        for handle in handles:
            await handle.read(0, 100)
    await trio.sleep(10)
    slices.request([(world.entries[step], [INDEX]) for step in range(40, 80)])
    await trio.sleep(1)
    if end == "checkpoint":
        slices.forget_below(Step(40))
    else:
        slices.keep_opened()
    await trio.testing.wait_all_tasks_blocked()
    world.store.objects.clear()
    for step, handle in enumerate(handles):
        assert bytes(await handle.read(0, MIB)) == world.payloads[step][0]
    handle = slices.open(world.entries[39], INDEX)


async def test_files_whose_heads_were_read_long_ago_make_room_and_are_fetched_again_when_they_are_read(
    nursery, autojump_clock
):
    """`np.load(mmap_mode="r")` reads a header, and then nothing."""
    world = world_of(140, 512 * KIB)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=16 * MIB, opened_are_kept=True))
    handles = []
    for step in range(100):
        handles.append(slices.open(world.entries[step], INDEX))
        await handles[-1].read(0, 128)
        await trio.sleep(0.1)
    await trio.sleep(2)
    slices.request([(world.entries[step], [INDEX]) for step in range(100, 118)])
    await trio.testing.wait_all_tasks_blocked()
    assert all(slices.holds(Step(step), INDEX) for step in range(100, 118))
    assert slices.counts.requests == 118
    assert bytes(await handles[0].read(0, MIB)) == world.payloads[0][0]
    assert slices.counts.requests == 119


async def test_what_a_reader_waits_for_or_has_just_read_does_not_become_idle(nursery, autojump_clock):
    world = world_of(40, MIB)
    slices = Slices(world.store, memory_bytes=8 * MIB, opened_are_kept=True)
    world.store.behave = lambda *_: 4.0
    await nursery.start(slices.run)
    handle = slices.open(world.entries[0], INDEX)
    got = []

    async def read():
        got.append(bytes(await handle.read(0, MIB)))

    async with trio.open_nursery() as readers:
        readers.start_soon(read)
        await trio.sleep(3)
        for step in range(1, 40):
            slices.open(world.entries[step], INDEX)
    assert got == [world.payloads[0][0]]
    slices.request([(world.entries[step], [INDEX]) for step in range(1, 40)])
    await trio.sleep(100)
    assert slices.holds(Step(0), INDEX)
    assert slices.counts.requests == 8, "the budget, and nothing twice"


async def test_files_opened_all_at_once_and_read_in_order_are_fetched_ahead(nursery, autojump_clock):
    world = world_of(60, 256 * KIB)
    world.store.behave = lambda *_: 0.05
    slices = Slices(world.store, memory_bytes=16 * MIB, opened_are_kept=True)
    prefetcher = Prefetcher(slices, world, world, processor_s=processor())
    slices.on_reading = prefetcher.note_open
    await nursery.start(slices.run)
    await nursery.start(prefetcher.run)
    handles = [slices.open(world.entries[step], INDEX) for step in range(60)]
    await trio.sleep(5)
    assert slices.counts.requests == 0
    waited = 0
    for step, handle in enumerate(handles):
        began = trio.current_time()
        assert bytes(await handle.read(0, MIB)) == world.payloads[step][0]
        waited += trio.current_time() > began
        handle.close()
        await trio.sleep(0.1)
    assert waited == 1
    assert slices.counts.bytes_fetched == 60 * 256 * KIB


async def test_readers_move_at_the_first_read_or_when_they_open_what_is_primed(nursery, tmp_path, monkeypatch):
    world = world_of(3, MIB)
    node = PrimedNode(tmp_path / "m", monkeypatch, world, memory_bytes=64 * MIB, kept=True)
    seen = []
    node.slices.on_reading = lambda step, index: seen.append((step, index))
    await nursery.start(node.slices.run)
    await nursery.start(node.primer.run)
    node.slices.request([(world.entries[2], [INDEX])])
    await until(lambda: node.primed(2))
    handle = node.slices.open(world.entries[0], INDEX)
    node.slices.open(world.entries[1], INDEX)
    node.slices.open(world.entries[2], INDEX)
    assert seen == [(2, 0)]
    await handle.read(0, 1)
    await handle.read(1, 1)
    assert seen == [(2, 0), (0, 0)]


async def test_an_idle_file_does_not_pin_its_disk_copy(nursery, autojump_clock, tmp_path):
    world = world_of(40, MIB)
    disk = DiskCache(tmp_path, "0" * 32, limit=4 * MIB)
    slices = Slices(world.store, memory_bytes=64 * MIB, opened_are_kept=True, disk=disk)
    async with trio.open_nursery() as inner:
        await inner.start(slices.run)
        slices.request([(world.entries[step], [INDEX]) for step in range(4)])
        await until(lambda: disk.used == 4 * MIB)
        handles = [slices.open(world.entries[step], INDEX) for step in range(40)]
        assert not slices.cache.is_pinned((Step(0), INDEX))
        assert bytes(await handles[0].read(0, MIB)) == world.payloads[0][0]
        assert slices.cache.is_pinned((Step(0), INDEX))
        for handle in handles:
            handle.close()
        assert not slices.cache.is_pinned((Step(0), INDEX))
        inner.cancel_scope.cancel()
    disk.close()


async def test_a_file_that_is_only_opened_and_closed_is_fetched_ahead_all_the_same(nursery, autojump_clock):
    """A look at a file, as mincore(2) needs one, before its GET is planned or while it waits for a connection."""
    world, entry = world_with([512 * KIB] * 3)
    last = SliceIndex(2)
    slices = Slices(
        world.store, memory_bytes=64 * MIB, opened_are_kept=True, concurrency=ConcurrencyLimit(1, fixed=True),
    )  # fmt: skip
    world.store.behave = lambda _number, _offset, _size: 1.0
    await nursery.start(slices.run)
    slices.request([(entry, [INDEX, last])])
    slices.open(entry, last).close()
    await until(lambda: world.store.requests)
    slices.open(entry, last).close()
    await until(lambda: slices.holds(Step(0), last))
    assert len(world.store.requests) == 2
