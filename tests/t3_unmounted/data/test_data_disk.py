"""The disk cache: a second budget, adopted after a crash, verified before it is believed, gone after unmount."""

from __future__ import annotations

import errno
import stat
import threading
from functools import partial

import pytest
import trio
import trio.testing
from at_work import at_work, until
from data_doubles import LAKE_ID, World, read_all, world_of

from stepfs.data.disk_cache import DiskCache
from stepfs.data.memory_cache import ReadingOrder
from stepfs.data.slices import Slices
from stepfs.data.tuning import TUNING
from stepfs.errors import RefusedError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step
from stepfs.store.local.local_store import fill

MIB = 1 << 20


async def started(nursery, place, world, *, disk=64 * MIB, memory=64 * MIB):
    """Slices over a disk cache in `place`, running."""
    cache = DiskCache(place, LAKE_ID, limit=disk)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=memory, disk=cache))
    return slices, cache


def steps_on_disk(disk):
    return sorted(int(file.name.split("-")[1]) for file in disk.path.glob("*.slice"))


def wish_all(slices, world):
    slices.request([(entry, [SliceIndex(0)]) for entry in world.entries])


async def crashed_cache(tmp_path, world, memory_bytes=64 * MIB, limit=64 * MIB):
    """A daemon fetched everything and was killed."""
    disk = DiskCache(tmp_path, LAKE_ID, limit=limit)
    slices = Slices(world.store, memory_bytes=memory_bytes, disk=disk)
    async with trio.open_nursery() as nursery:
        await nursery.start(slices.run)
        wish_all(slices, world)
        await until(lambda: len(steps_on_disk(disk)) == len(world.entries))
        nursery.cancel_scope.cancel()


async def test_a_crashed_cache_is_adopted(nursery, tmp_path):
    world = world_of(4, 9 * MIB)
    await crashed_cache(tmp_path, world)
    world.store.objects.clear()
    slices, _ = await started(nursery, tmp_path, world)
    for entry, (payload,) in zip(world.entries, world.payloads, strict=True):
        handle = slices.open(entry, SliceIndex(0))
        assert await read_all(handle) == payload
        handle.close()
    assert slices.counts.adopted_files == 4
    assert slices.counts.requests == 0


@pytest.mark.logs("CRC32C.*cached copy is dropped|truncated")
@pytest.mark.parametrize("damage", ["flip", "swap"])
async def test_a_damaged_file_is_not_believed(nursery, tmp_path, damage):
    world = world_of(2, 2 * MIB)
    await crashed_cache(tmp_path, world)
    first, second = sorted(tmp_path.glob("*/*.slice"))
    sound = first.read_bytes()
    if damage == "flip":
        data = bytearray(first.read_bytes())
        data[123456] ^= 1
        first.write_bytes(data)
    else:
        first.write_bytes(second.read_bytes())
    slices, _ = await started(nursery, tmp_path, world)
    handle = slices.open(world.entries[0], SliceIndex(0))
    assert await read_all(handle) == world.payloads[0][0]
    assert slices.counts.requests == 1
    other = slices.open(world.entries[1], SliceIndex(0))
    assert await read_all(other) == world.payloads[1][0]
    assert slices.counts.requests == 1
    await until(lambda: not first.exists() or first.read_bytes() == sound)  # no later daemon meets it


async def test_files_are_private_and_named_by_their_identity(tmp_path):
    world = world_of(1, 2 * MIB)
    await crashed_cache(tmp_path, world)
    (file,) = tmp_path.glob("*/*.slice")
    ref = world.entries[0].tgb.slice(SliceIndex(0))
    assert file.name == f"{LAKE_ID}-{0:020d}-{0:07d}-{ref.length}-{ref.crc32c:08x}.slice"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


async def test_another_slice_under_the_same_step_is_not_served(nursery, tmp_path):
    """A lake recreated under the same id cannot be; but a cache must not depend on that."""
    world = world_of(1, 2 * MIB)
    await crashed_cache(tmp_path, world)
    other = World(seed=2)
    other.add_step([2 * MIB])
    slices, _ = await started(nursery, tmp_path, other)
    assert await read_all(slices.open(other.entries[0], SliceIndex(0))) == other.payloads[0][0]
    assert slices.counts.requests == 1


async def test_the_disk_holds_more_than_memory(nursery, tmp_path):
    world = world_of(12, 2 * MIB)
    slices, disk = await started(nursery, tmp_path, world, memory=6 * MIB)
    wish_all(slices, world)
    await until(lambda: len(steps_on_disk(disk)) == 12)
    assert slices.cache.pool.used <= 6 * MIB
    world.store.objects.clear()
    for entry, (payload,) in zip(world.entries, world.payloads, strict=True):
        handle = slices.open(entry, SliceIndex(0))
        assert await read_all(handle) == payload
        handle.close()
    assert slices.counts.requests == 12


async def test_the_disk_limit_holds_and_the_nearest_steps_stay(nursery, tmp_path):
    world = world_of(12, 2 * MIB)
    slices, disk = await started(nursery, tmp_path, world, disk=8 * MIB)
    wish_all(slices, world)
    await until(lambda: steps_on_disk(disk) == [0, 1, 2, 3] and disk.used == 8 * MIB)


def test_in_an_announced_order_the_steps_read_last_leave_the_disk(tmp_path):
    disk = DiskCache(tmp_path, LAKE_ID, limit=3)
    for step in (1, 2, 3):
        disk.add((Step(step), SliceIndex(0)), f"{step}", 1)
    disk.order = ReadingOrder(map(Step, (3, 7, 1, 5)), low=Step(0))
    room = partial(disk.make_room, size=1, is_pinned=lambda key: False, is_last_copy=lambda key: False)
    assert room((Step(7), SliceIndex(0))) == ["2"], "no step of the order"
    disk.add((Step(7), SliceIndex(0)), "7", 1)
    assert room((Step(5), SliceIndex(0))) is None
    assert room((Step(3), SliceIndex(1))) == ["1"]


def test_a_file_that_was_read_and_is_read_again_soon_stays_on_the_disk(tmp_path):
    disk = DiskCache(tmp_path, LAKE_ID, limit=3)
    for step in (1, 2, 3):
        disk.add((Step(step), SliceIndex(0)), f"{step}", 1)
        disk.consume((Step(step), SliceIndex(0)))
    disk.order = ReadingOrder(map(Step, (1, 7, 3)))
    room = partial(disk.make_room, size=1, is_pinned=lambda key: False, is_last_copy=lambda key: False)
    assert room((Step(7), SliceIndex(0))) == ["2"]
    disk.add((Step(7), SliceIndex(0)), "7", 1)
    assert room((Step(7), SliceIndex(1))) == ["3"], "read again, and last"
    disk.add((Step(7), SliceIndex(1)), "7-1", 1)
    assert room((Step(7), SliceIndex(2))) is None


def test_a_file_of_thousands_is_found_without_ranking_each(tmp_path):
    """Of 100,000 adopted ones the loop ranked and sorted all, a quarter of a second, for each slice that was fetched."""
    ranked = []

    class Counting(ReadingOrder):
        def distance(self, step):
            ranked.append(step)
            return super().distance(step)

    disk = DiskCache(tmp_path, LAKE_ID, limit=1000)
    for step in range(1000):
        disk.add((Step(step), SliceIndex(0)), f"{step}", 1)
    room = partial(disk.make_room, size=1, is_pinned=lambda key: False, is_last_copy=lambda key: False)
    disk.order = Counting([Step(1000)])
    assert room((Step(1000), SliceIndex(0))) == ["999"]
    disk.add((Step(1000), SliceIndex(0)), "1000", 1)
    disk.order = Counting(map(Step, range(1002)))
    assert room((Step(1001), SliceIndex(0))) is None
    assert len(ranked) <= 10


@pytest.mark.parametrize("size", [2, 5])
def test_a_slice_that_gets_no_room_takes_no_file_out_of_the_index(tmp_path, size):
    """Such files stayed on the disk, uncounted: with slices of different sizes the disk filled up beyond its limit."""
    disk = DiskCache(tmp_path, LAKE_ID, limit=4)
    keys = [(Step(step), SliceIndex(0)) for step in range(4)]
    for key in keys:
        disk.add(key, f"{key[0]}", 1)
    disk.consume(keys[3])
    room = partial(
        disk.make_room, (Step(2), SliceIndex(1)), is_pinned=lambda key: False, is_last_copy=keys.__contains__
    )
    assert room(size=size) is None
    assert disk.used == 4
    assert room(size=1) == ["3"]


async def test_forgotten_steps_leave_the_disk_but_not_while_open(nursery, tmp_path):
    world = world_of(3, 2 * MIB)
    slices, disk = await started(nursery, tmp_path, world)
    wish_all(slices, world)
    await until(lambda: len(steps_on_disk(disk)) == 3)
    handle = slices.open(world.entries[0], SliceIndex(0))
    slices.forget_below(Step(2))
    await until(lambda: len(steps_on_disk(disk)) == 2)
    world.store.objects.clear()
    assert await read_all(handle) == world.payloads[0][0]
    handle.close()
    await until(lambda: len(steps_on_disk(disk)) == 1)


@pytest.mark.logs("does not answer")
async def test_a_disk_that_hangs_is_left_alone_and_the_store_read(nursery, tmp_path, monkeypatch, autojump_clock):
    world = world_of(100, MIB)
    await crashed_cache(tmp_path, world, limit=200 * MIB)
    answers, asked = threading.Event(), []

    def hangs(*arguments):
        asked.append(trio.from_thread.run_sync(trio.current_time))
        answers.wait()
        return fill(*arguments)

    monkeypatch.setattr("stepfs.data.disk_cache.fill", hangs)
    slices, _ = await started(nursery, tmp_path, world, disk=200 * MIB, memory=16 * MIB)
    for step in range(80):
        began = trio.current_time()
        handle = slices.open(world.entries[step], SliceIndex(0))
        assert await read_all(handle) == world.payloads[step][0]
        handle.close()
        assert trio.current_time() - began <= TUNING.silence_s + 1
        await trio.sleep(5)
    assert len(asked) == TUNING.late_max, "none is asked while so many are owed"
    answers.set()
    await until(lambda: not slices.disk_copies.patience.is_over())
    handle = slices.open(world.entries[80], SliceIndex(0))
    assert await read_all(handle) == world.payloads[80][0]
    handle.close()
    await until(lambda: len(asked) == TUNING.late_max + 1)


@pytest.mark.parametrize("work", ["write", "remove"])
async def test_a_disk_that_hangs_keeps_no_daemon(nursery, tmp_path, monkeypatch, work):
    world = world_of(4, MIB)
    hangs, answers = trio.Event(), threading.Event()

    def hang(*_):
        trio.from_thread.run_sync(hangs.set)
        answers.wait()
        return ""

    async with trio.open_nursery() as ends:
        slices, disk = await started(ends, tmp_path, world)
        monkeypatch.setattr(disk, work, hang)
        wish_all(slices, world)
        if work == "remove":
            await until(lambda: len(steps_on_disk(disk)) == 4)
            slices.forget_below(Step(2))
        await hangs.wait()
        handle = slices.open(world.entries[3], SliceIndex(0))
        assert await read_all(handle) == world.payloads[3][0]
        handle.close()
        ends.cancel_scope.cancel()
    answers.set()


@pytest.mark.logs("No space left on device; caching in memory only")
async def test_a_full_disk_degrades_to_memory(nursery, tmp_path, monkeypatch):
    world = world_of(4, 2 * MIB)
    disk = DiskCache(tmp_path, LAKE_ID, limit=64 * MIB)
    tried = trio.Event()

    def full(*_):
        trio.from_thread.run_sync(tried.set)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("stepfs.data.disk_cache.write_all", full)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=64 * MIB, disk=disk))
    wish_all(slices, world)
    await tried.wait()
    for entry, (payload,) in zip(world.entries, world.payloads, strict=True):
        handle = slices.open(entry, SliceIndex(0))
        assert await read_all(handle) == payload
        handle.close()
    await until(lambda: [file.name for file in disk.path.iterdir()] == [])
    assert disk.used == slices.counts.disk_written == 0


@pytest.mark.logs("Read-only file system; caching in memory only")
async def test_a_disk_that_nothing_can_be_deleted_from_degrades_to_memory(nursery, tmp_path, monkeypatch):
    """What ext4 does at an error: `remount-ro`."""
    world = world_of(4, 2 * MIB)
    slices, disk = await started(nursery, tmp_path, world)
    wish_all(slices, world)
    await until(lambda: len(steps_on_disk(disk)) == 4)
    tried = []

    def read_only(name, *, dir_fd):
        tried.append(name)
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("os.unlink", read_only)
    slices.forget_below(Step(2))
    await until(lambda: len(tried) == 2)
    for step in (2, 3):
        handle = slices.open(world.entries[step], SliceIndex(0))
        assert await read_all(handle) == world.payloads[step][0]
        handle.close()
    monkeypatch.undo()


def test_leftovers_that_are_not_slices_are_cleared(tmp_path):
    place = tmp_path / "slices"
    place.mkdir(mode=0o700)
    (place / "x.slice.tmp").write_bytes(b"half")
    (place / f"{'1' * 32}-{0:020d}-{0:07d}-4-{0:08x}.slice").write_bytes(b"fore")
    (place / f"{LAKE_ID}-{0:020d}-{0:07d}-4-{0:08x}.slice").write_bytes(b"short"[:3])
    disk = DiskCache(tmp_path, LAKE_ID, limit=MIB)
    assert disk.adopted == 0
    assert [file.name for file in place.iterdir()] == []


def test_an_unusable_cache_directory_is_refused_with_advice(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="choose another --cache-dir"):
        DiskCache(tmp_path / "file", LAKE_ID, limit=BLOCK_BYTES)
