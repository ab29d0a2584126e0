"""Priming thousands of small files: what a file costs must not grow with how many there are."""

from __future__ import annotations

import trio
import trio.testing
from at_work import until
from data_doubles import World, world_with
from data_pages import Pages

from stepfs.data.pagecache import primer as prime_module
from stepfs.data.pagecache.primer import Primer
from stepfs.data.slices import Slices
from stepfs.format.ids import SliceIndex

MIB = 1 << 20


async def test_of_many_small_files_a_few_are_checked_and_all_once_one_is_gone(nursery, tmp_path, monkeypatch):
    world, entry = world_with([8192] * 64)
    (tmp_path / "mount").mkdir()
    pages = Pages(tmp_path / "mount", world)
    looked, gone = [], set()

    def resident(path, length):
        looked.append(path.name)
        return 0 if path.name in gone else length

    monkeypatch.setattr(prime_module, "resident_bytes", resident)
    slices = Slices(world.store, memory_bytes=64 * MIB)
    primer = Primer(slices, pages)
    await nursery.start(slices.run)
    everything = [(entry, [SliceIndex(index) for index in range(64)])]
    slices.requests.replace(everything)
    await nursery.start(primer.run)
    await until(lambda: not (slices.counts.primed_files < 64 or len(looked) < 8))
    assert len(looked) == 8
    gone.update({"0-24", "0-25"})
    primer.closed((entry.step, SliceIndex(24)))  # it may be read again: looked at again
    slices.requests.replace(everything)
    await until(lambda: slices.counts.reprimed_files >= 2)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert slices.counts.reprimed_files == 2, "once per turn, even if the kernel evicts it again at once"
    assert {"0-24", "0-25"} <= set(looked[8:])


async def test_of_many_small_files_no_more_are_checked_while_readers_work_through_them(nursery, tmp_path, monkeypatch):
    world, entry = world_with([8192] * 64)
    (tmp_path / "mount").mkdir()
    looked = []
    monkeypatch.setattr(prime_module, "resident_bytes", lambda path, length: looked.append(path.name) or length)
    slices = Slices(world.store, memory_bytes=64 * MIB)
    primer = Primer(slices, Pages(tmp_path / "mount", world))
    await nursery.start(slices.run)
    slices.requests.replace([(entry, [SliceIndex(index) for index in range(64)])])
    await nursery.start(primer.run)
    await until(lambda: not (slices.counts.primed_files < 64 or len(looked) < 8))
    for opened in range(64):
        slices.requests.replace([(entry, [SliceIndex(index) for index in range(opened + 1, 64)])])
        await trio.testing.wait_all_tasks_blocked(0.002)
    assert len(looked) == 8, "each look costs an open"


async def test_reading_thousands_of_files_looks_through_the_wishes_as_often_as_they_change(
    nursery, tmp_path, monkeypatch
):
    world = World()
    entries = [world.add_step([4096] * 32) for _ in range(4)]
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr(prime_module, "resident_bytes", lambda _path, length: length)
    slices = Slices(world.store, memory_bytes=64 * MIB)
    primer = Primer(slices, Pages(tmp_path / "mount", world))
    await nursery.start(slices.run)
    slices.requests.replace([(entry, [SliceIndex(index) for index in range(32)]) for entry in entries])
    await nursery.start(primer.run)
    await until(lambda: slices.counts.primed_files >= 128)
    await trio.testing.wait_all_tasks_blocked(0.05)
    looks = 0
    listed = slices.requests.listed

    def counted():
        nonlocal looks
        looks += 1
        return listed()

    monkeypatch.setattr(slices.requests, "listed", counted)
    for entry in entries:
        for index in range(32):
            slices.reads.open(entry, SliceIndex(index)).close()
            await trio.testing.wait_all_tasks_blocked()
    assert looks == 0, "it was once per close: 2 ms of the loop's time each, with 4,096 wishes"
