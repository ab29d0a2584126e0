"""Priming thousands of small files: what a file costs must not grow with how many there are."""

from __future__ import annotations

import pytest
import trio.testing
from at_work import at_work, until
from data_doubles import world_of, world_with
from data_pages import Pages

from stepfs.data import page_cache as prime_module
from stepfs.data.memory_cache import ReadingOrder
from stepfs.data.page_cache import Primer
from stepfs.data.slices import Slices
from stepfs.format.ids import SliceIndex, Step

MIB = 1 << 20


def wishes(world, first=0):
    return [(entry, [SliceIndex(index) for index in range(first, entry.tgb.slices)]) for entry in world.entries]


@pytest.fixture
def primed(nursery, tmp_path, monkeypatch):
    """Slices and a primer that has been asked for all of a world; `resident` says what the kernel holds."""

    async def begin(world, resident):
        monkeypatch.setattr(prime_module, "resident_bytes", resident)
        slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB))
        slices.request(wishes(world))
        return slices, await at_work(nursery, Primer(slices, Pages(tmp_path, world)))

    return begin


async def test_of_many_small_files_a_few_are_checked_and_all_once_one_is_gone(primed):
    world, entry = world_with([8192] * 64)
    looked, gone = [], set()

    def resident(path, length):
        looked.append(path.name)
        return 0 if path.name in gone else length

    slices, primer = await primed(world, resident)
    await until(lambda: slices.counts.primed_files >= 64 and len(looked) >= 8)
    assert len(looked) == 8
    gone.update({"0-24", "0-25"})
    primer.closed((entry.step, SliceIndex(24)))  # it may be read again: looked at again
    slices.request(wishes(world))
    await until(lambda: slices.counts.reprimed_files >= 2)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert slices.counts.reprimed_files == 2, "once per turn, even if the kernel evicts it again at once"
    assert {"0-24", "0-25"} <= set(looked[8:])


async def test_of_many_small_files_no_more_are_checked_while_readers_work_through_them(primed):
    world, looked = world_of(1, *[8192] * 64), []
    slices, _ = await primed(world, lambda path, length: looked.append(path.name) or length)
    await until(lambda: slices.counts.primed_files >= 64 and len(looked) >= 8)
    for opened in range(64):
        slices.request(wishes(world, opened + 1))
        await trio.testing.wait_all_tasks_blocked(0.002)
    assert len(looked) == 8, "each look costs an open"


async def test_reading_thousands_of_files_looks_through_the_wishes_as_often_as_they_change(primed, monkeypatch):
    world = world_of(4, *[4096] * 32)
    slices, _ = await primed(world, lambda _path, length: length)
    await until(lambda: slices.counts.primed_files >= 128)
    await trio.testing.wait_all_tasks_blocked(0.05)
    looks = 0
    requested = slices.requested

    def counted(_slices):
        nonlocal looks
        looks += 1
        return requested

    monkeypatch.setattr(type(slices), "requested", property(counted))
    for entry in world.entries:
        for index in range(32):
            slices.open(entry, SliceIndex(index)).close()
            await trio.testing.wait_all_tasks_blocked()
    assert looks == 0, "it was once per close: 2 ms of the loop's time each, with 4,096 wishes"


async def test_the_files_of_an_order_that_was_given_up_leave_together(nursery, tmp_path, monkeypatch):
    """One by one, each cost a look at all of them and a call into a thread."""
    world = world_of(2, *[8192] * 64)
    monkeypatch.setattr(prime_module, "resident_bytes", lambda _path, length: length)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=2 * 64 * 8192))
    primer = await at_work(nursery, Primer(slices, Pages(tmp_path, world)))
    drops, drop = [], primer._drop
    monkeypatch.setattr(primer, "_drop", lambda keys: drops.append(keys) or drop(keys))
    for step in (0, 1):
        slices.set_order(ReadingOrder([Step(step)]))
        slices.request(wishes(world)[step : step + 1])
        await until(lambda step=step: sum(key[0] == step for key in primer.primed) == 64)
    assert [len(keys) for keys in drops] == [64]
