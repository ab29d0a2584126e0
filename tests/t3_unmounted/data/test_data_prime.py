"""Priming against a page cache made of files: what is stored, checked, dropped, and when it gives up."""

from __future__ import annotations

import errno
import threading

import pytest
import trio
import trio.testing
from at_work import at_work, until
from data_doubles import LAKE_ID, World
from data_pages import Pages

from stepfs.data import page_cache as prime_module
from stepfs.data.disk_cache import DiskCache
from stepfs.data.memory_cache import ReadingOrder
from stepfs.data.page_cache import CHUNK_BYTES, Primer
from stepfs.data.slices import Slices
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step

MIB = 1 << 20


class Bench:
    def __init__(self, tmp_path, monkeypatch, *, steps, size, memory_bytes=256 * MIB, disk_bytes=0, peers=1):
        self.world = World()
        for _ in range(steps):
            self.world.add_step([size])
        mount = tmp_path / "mount"
        mount.mkdir()
        self.pages = Pages(mount, self.world)
        self.resident = {}  # path → bytes found; whole unless said otherwise
        monkeypatch.setattr(prime_module, "resident_bytes", self.resident.get)
        monkeypatch.setattr(prime_module, "drop_pages", self.pages.dropped.append)
        disk = DiskCache(tmp_path / "cache", LAKE_ID, limit=disk_bytes) if disk_bytes else None
        self.slices = Slices(self.world.store, memory_bytes=memory_bytes, disk=disk, peers=peers)
        self.primer = Primer(self.slices, self.pages)

    async def run(self, *, task_status):
        async with trio.open_nursery() as nursery:
            await nursery.start(self.slices.run)
            await nursery.start(self.primer.run)
            task_status.started()

    def prefetch(self, *steps):
        self.slices.set_order(ReadingOrder(map(Step, steps)))
        self.slices.request([(self.world.entries[step], [SliceIndex(0)]) for step in steps])

    def key(self, step):
        return Step(step), SliceIndex(0)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return lambda **options: Bench(tmp_path, monkeypatch, **options)


@pytest.mark.parametrize("size", [1, 4096, 4097, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * BLOCK_BYTES + 5])
async def test_pages_are_stored_in_aligned_chunks_to_the_exact_end(nursery, bench, size):
    there = await at_work(nursery, bench(steps=2, size=size))
    there.prefetch(0, 1)
    await until(lambda: there.slices.counts.primed_files == 2)
    for step in (0, 1):
        assert there.pages.content(step) == there.world.payloads[step][0]
        assert there.key(step) in there.primer.primed
    assert there.slices.counts.primed == 2 * size
    assert trio.lowlevel.current_task() is not None
    assert threading.get_native_id() not in there.pages.threads


async def test_without_a_disk_copy_the_daemon_keeps_its_own(nursery, bench):
    there = await at_work(nursery, bench(steps=1, size=4 * MIB))
    there.prefetch(0)
    await until(lambda: there.slices.counts.primed_files == 1)
    assert there.slices.holds(*there.key(0))
    assert there.slices.cache.pool.used == 8 * MIB


async def test_with_a_disk_copy_the_daemons_own_goes_and_open_loads_nothing(nursery, bench):
    there = await at_work(nursery, bench(steps=1, size=4 * MIB, disk_bytes=64 * MIB))
    there.prefetch(0)
    await until(lambda: there.slices.counts.primed_files and not there.slices.holds(*there.key(0)))
    there.slices.cache.pool.sweep()
    assert there.slices.cache.pool.used == 4 * MIB
    there.world.store.objects.clear()
    handle = there.slices.open(there.world.entries[0], SliceIndex(0))
    await trio.testing.wait_all_tasks_blocked()
    assert there.slices.counts.disk_hits == 0
    assert bytes(await handle.read(MIB, 100)) == there.world.payloads[0][0][MIB : MIB + 100]
    assert there.slices.counts.requests == 1
    handle.close()


async def test_what_the_kernel_evicted_is_primed_again_one_step_ahead(nursery, bench):
    there = await at_work(nursery, bench(steps=3, size=4 * MIB))
    there.prefetch(0, 1, 2)
    await until(lambda: there.slices.counts.primed_files == 3)
    there.resident[there.pages.path(1, 0)] = MIB
    there.prefetch(1, 2)
    await until(lambda: there.slices.counts.reprimed_files == 1)
    assert there.pages.content(1)[-4 * MIB :] == there.world.payloads[1][0]
    assert there.slices.counts.primed == 16 * MIB
    assert there.slices.counts.requests == 3


async def test_pages_and_memory_share_one_budget(nursery, bench):
    there = await at_work(nursery, bench(steps=12, size=2 * MIB, memory_bytes=16 * MIB))
    primed = 0
    for step in range(12):
        there.prefetch(*range(step, min(step + 3, 12)))
        await until(lambda step=step: there.key(step) in there.primer.primed)
        handle = there.slices.open(there.world.entries[step], SliceIndex(0))
        assert there.slices.cache.pool.used <= 16 * MIB
        assert there.primer.bytes <= 8 * MIB
        primed = max(primed, there.primer.bytes)
        handle.close()
    assert primed >= 4 * MIB
    assert there.pages.dropped[0] == there.pages.path(0, 0), "consumed pages leave first, oldest first"
    assert there.slices.counts.requests == 12


async def test_forgotten_steps_are_no_longer_counted(nursery, bench):
    there = await at_work(nursery, bench(steps=2, size=4 * MIB))
    there.prefetch(0, 1)
    await until(lambda: there.slices.counts.primed_files == 2)
    there.slices.forget_below(Step(2))
    assert there.primer.bytes == there.slices.cache.pool.used == 0


async def test_it_gives_up_quietly_where_the_kernel_refuses(nursery, bench):
    there = bench(steps=5, size=BLOCK_BYTES)
    there.pages.error = OSError(errno.ENOSYS, "Function not implemented")
    await nursery.start(there.run)
    there.prefetch(0, 1, 2, 3, 4)
    await until(lambda: not there.primer.threads.working)
    await trio.testing.wait_all_tasks_blocked()
    assert there.slices.counts.primed == there.primer.bytes == 0
    assert there.slices.holds(*there.key(0))


async def test_a_step_this_mount_does_not_show_is_left_alone(nursery, bench):
    there = bench(steps=3, size=MIB)
    there.pages.path(0, 0).unlink()
    await nursery.start(there.run)
    there.prefetch(0, 1, 2)
    await until(lambda: there.slices.counts.primed_files == 2)
    assert there.key(0) not in there.primer.primed
    assert there.primer.threads.working


async def test_requests_of_its_own_threads_are_known(nursery, bench):
    there = bench(steps=1, size=MIB)
    seen = []
    there.pages.store_pages = lambda *_: seen.append(there.primer.threads.has(threading.get_native_id()))
    await nursery.start(there.run)
    there.prefetch(0)
    await until(lambda: there.slices.counts.primed_files == 1)
    assert seen == [True]
    assert not there.primer.threads.has(threading.get_native_id())


async def test_a_smaller_budget_puts_pages_out(nursery, bench):
    there = await at_work(nursery, bench(steps=4, size=4 * MIB, memory_bytes=64 * MIB))
    there.prefetch(0, 1, 2, 3)
    await until(lambda: there.slices.counts.primed_files == 4)
    there.slices.set_memory(8 * MIB)
    await until(lambda: len(there.pages.dropped) == 2)  # by a thread, after they have left the account
    assert there.slices.cache.pool.used <= 8 * MIB
    assert there.pages.dropped == [there.pages.path(3, 0), there.pages.path(2, 0)]


async def test_a_smaller_budget_puts_out_the_pages_that_are_read_last(nursery, bench):
    there = await at_work(nursery, bench(steps=4, size=4 * MIB, memory_bytes=64 * MIB))
    there.prefetch(0, 3, 1, 2)
    await until(lambda: there.slices.counts.primed_files == 4)
    there.slices.open(there.world.entries[0], SliceIndex(0))
    there.prefetch(3, 1, 2)
    there.slices.set_memory(12 * MIB)
    await until(lambda: len(there.pages.dropped) == 2)
    assert there.pages.dropped == [there.pages.path(2, 0), there.pages.path(1, 0)]


async def test_a_second_look_at_primed_pages_fetches_nothing_until_the_step_is_reclaimed(nursery, bench):
    there = await at_work(nursery, bench(steps=1, size=4 * MIB, disk_bytes=64 * MIB))
    there.prefetch(0)
    await until(lambda: there.slices.counts.primed_files and not there.slices.holds(*there.key(0)))
    there.slices.open(there.world.entries[0], SliceIndex(0)).close()
    there.slices.disk_copies.disk.remove(
        [there.slices.disk_copies.disk.forget(there.key(0))]
    )  # consumed files leave first
    handle = there.slices.open(there.world.entries[0], SliceIndex(0))
    await trio.testing.wait_all_tasks_blocked()
    assert there.slices.counts.requests == 1
    there.slices.forget_below(Step(1))
    await until(lambda: there.slices.holds(*there.key(0)))
    there.world.store.objects.clear()
    assert bytes(await handle.read(0, 4 * MIB)) == there.world.payloads[0][0]
    assert there.slices.counts.requests == 2


@pytest.mark.parametrize(("size", "marked"), [(CHUNK_BYTES - 1, 0), (CHUNK_BYTES, 2), (3 * MIB, 2)])
async def test_the_pages_of_large_files_count_as_used(nursery, bench, monkeypatch, size, marked):
    there = bench(steps=2, size=size)
    seen = []

    def mark(path, length):
        seen.append((path, length))
        raise OSError(errno.EIO, "evicted meanwhile")

    monkeypatch.setattr(prime_module, "mark_used", mark)
    await nursery.start(there.run)
    there.prefetch(0, 1)
    await until(lambda: there.slices.counts.primed_files == 2)
    assert seen == [(there.pages.path(step, 0), size) for step in range(marked)]
    assert there.primer.threads.working


async def test_pages_that_another_reader_will_need_stay_when_one_has_closed_the_file(nursery, bench):
    there = await at_work(nursery, bench(steps=14, size=MIB, memory_bytes=16 * MIB, peers=2))

    def use(step):
        there.slices.open(there.world.entries[step], SliceIndex(0)).close()

    there.prefetch(*range(4))
    await until(lambda: all(there.key(step) in there.primer.primed for step in range(4)))
    for step in (0, 0, 1, 1, 2, 2, 3, 3):
        use(step)
    for step in range(4, 12):
        there.prefetch(step, step + 1)
        await until(lambda step=step: there.key(step) in there.primer.primed)
        use(step)
    await until(lambda: there.key(12) in there.primer.primed)
    for step in range(4, 8):
        assert there.key(step) in there.primer.primed, "a quarter of the budget waits for the other reader"
    assert there.pages.path(8, 0) in there.pages.dropped
    assert there.slices.counts.requests == 13


async def test_pages_of_an_order_that_was_given_up_make_room(nursery, bench):
    """They were never opened, so nothing dropped them: a trainer that resumed elsewhere got no pages for an epoch."""
    there = await at_work(nursery, bench(steps=8, size=4 * MIB, memory_bytes=32 * MIB))
    there.prefetch(0, 1, 2, 3)
    await until(lambda: there.slices.counts.primed_files == 4)
    there.slices.open(there.world.entries[1], SliceIndex(0))
    there.prefetch(4, 5, 6, 7)
    await until(lambda: there.slices.counts.primed_files == 6)
    assert {step for step, _ in there.primer.primed} == {1, 4, 5}, "what is open keeps its pages"


async def test_a_file_that_leaves_the_order_before_it_is_stored_is_not(nursery, bench, monkeypatch):
    """It was stored and charged to nobody, once it had made room for the file behind it."""
    there = bench(steps=5, size=4 * MIB, memory_bytes=32 * MIB, disk_bytes=64 * MIB)
    there.world.add_step([8 * MIB])
    there.pages.path(5, 0).touch()
    await at_work(nursery, there)
    there.prefetch(0, 1, 2, 3)
    await until(lambda: there.slices.counts.primed_files == 4 and not there.slices.holds(*there.key(3)))
    looked, both_are_ready = threading.Event(), threading.Event()

    def resident(path, length):
        looked.set()
        assert both_are_ready.wait(60)
        return length

    def drop(path):
        there.pages.dropped.append(path)
        if path == there.pages.path(3, 0):  # to make room for step 5
            trio.from_thread.run_sync(there.prefetch, 1, 2)

    monkeypatch.setattr(prime_module, "resident_bytes", resident)
    monkeypatch.setattr(prime_module, "drop_pages", drop)
    there.prefetch(1, 2, 4, 5)
    await until(lambda: looked.is_set() and all(there.slices.holds(*there.key(step)) for step in (4, 5)))
    both_are_ready.set()
    await until(lambda: there.key(5) in there.primer.primed and there.pages.content(5))
    await until(lambda: there.slices.counts.primed_files == 5)
    assert {step for step, _ in there.primer.primed} == {1, 2, 5}
    assert there.pages.content(4) == b"", "nobody counts it"
