"""Following a checkpoint directory: keep-last-k, rollback, restarts, lagging nodes, vanished volumes."""

from __future__ import annotations

import errno
import threading
import time

import pytest
import trio
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from trio.testing import MockClock

from stepfs.checkpoints.formats import Found, NextStep, Place
from stepfs.checkpoints.watch import Watch
from stepfs.errors import AbsentError
from stepfs.format.control import KEPT_CHECKPOINTS_MAX
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake


class Directory:
    """What a node sees; None while the volume is away."""

    def __init__(self, *counters: int) -> None:
        self.counters: set[int] | None = set(counters)
        self.barred: set[int] = set()
        self.error: OSError | None = None

    def look(self) -> Found:
        if self.error is not None:
            raise self.error
        if self.counters is None:
            raise AbsentError("away")
        return Found(frozenset(self.counters), frozenset(self.barred))


async def group_of(name: str = "run") -> Group:
    store = FaultyStore()
    return Group.of(store, await create_lake(store, slices=1, clock=TrioClock()), name, TrioClock())


def watch_of(group: Group, directory: Directory) -> Watch:
    return Watch(group, Place.parse("/unused"), NextStep("N+1"), look_at=directory.look)


async def kept(group: Group) -> tuple[Step, ...]:
    record = await group.read()
    assert record is not None
    return record.kept


async def test_keep_last_k_and_a_rollback_are_followed(patient_clock: MockClock) -> None:
    group, directory = await group_of(), Directory()
    watch = watch_of(group, directory)
    await group.register()
    for counters, expected in [
        ({10}, (11,)),
        ({10, 20}, (11, 21)),
        ({20, 30}, (21, 31)),
        ({20}, (21,)),
        ({20, 25}, (21, 26)),
    ]:
        directory.counters = counters
        await watch.look_once()
        assert await kept(group) == expected


async def test_a_first_empty_look_drops_nothing(patient_clock: MockClock) -> None:
    group = await group_of()
    await group.add(Step(11))
    await watch_of(group, Directory()).look_once()
    assert await kept(group) == (11,)


async def test_what_was_deleted_while_nobody_watched_is_dropped_at_the_next_start(patient_clock):
    group = await group_of()
    await group.add(Step(11))
    await watch_of(group, Directory(20)).look_once()
    assert await kept(group) == (21,)


async def test_a_lagging_node_keeps_more_for_a_while_and_drops_nothing(patient_clock: MockClock) -> None:
    group, fresh, stale = await group_of(), Directory(10), Directory(10)
    one, two = watch_of(group, fresh), watch_of(group, stale)
    for watch in (one, two):
        await watch.look_once()
    fresh.counters = {20}
    await one.look_once()
    await two.group.read()
    await two.look_once()
    assert await kept(group) == (11, 21)
    stale.counters = {20}
    await two.look_once()
    assert await kept(group) == (21,)


@pytest.mark.logs("away: nothing is recorded until it does")
async def test_a_vanished_volume_drops_nothing_and_the_watch_goes_on(patient_clock: MockClock) -> None:
    group, directory = await group_of(), Directory(10)
    watch = watch_of(group, directory)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.sleep(5)
        directory.counters = None
        await trio.sleep(5)
        assert await kept(group) == (11,)
        directory.counters = {20}
        await trio.sleep(5)
        assert await kept(group) == (21,)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE, errno.EIO])
async def test_a_look_that_fails_half_way_drops_nothing_and_is_repeated(patient_clock, number):
    """The trainer deletes an old checkpoint between listing and looking; a network file system hiccups."""
    group, directory = await group_of(), Directory(10, 20)
    watch = watch_of(group, directory)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.sleep(5)
        directory.error = OSError(number, "half way")
        directory.counters = {20}
        await trio.sleep(5)
        assert await kept(group) == (11, 21)
        directory.error = None
        await trio.sleep(5)
        assert await kept(group) == (21,)
        nursery.cancel_scope.cancel()
    directory.error = OSError(number, "half way")
    assert "half way" in await watch.last_look()


async def test_what_may_not_be_looked_into_is_a_checkpoint_only_if_it_was_one(patient_clock):
    """A neighbour's directory must not stop everything; one of ours that is closed for a while was not deleted."""
    group, directory = await group_of(), Directory(10)
    await group.add(Step(6))
    directory.barred = {0, 5, 7}
    watch = Watch(group, Place.parse("/unused"), NextStep("N-1+2*1"), look_at=directory.look)
    for counters, barred, expected in (
        ({10}, {5, 7}, (6, 11)),
        ({10, 20}, {5, 7}, (6, 11, 21)),
        ({20}, {5, 7, 10}, (6, 11, 21)),
        ({20}, {7, 10}, (11, 21)),
        ({20}, {7}, (21,)),
    ):
        directory.counters, directory.barred = set(counters), set(barred)
        await watch.look_once()
        assert await kept(group) == expected
    directory.barred = {0}
    await Watch(group, Place.parse("/unused"), NextStep("N-1"), look_at=directory.look).look_once()


@pytest.mark.logs("have not been recorded 60 times in a row: cannot read the checkpoints")
async def test_looks_that_fail_for_a_minute_are_told_once(patient_clock, caplog):
    directory = Directory(10)
    directory.error = OSError(errno.EIO, "broken")
    caplog.set_level("INFO", "stepfs")
    with trio.move_on_after(300.5):
        await watch_of(await group_of(), directory).run()
    told = [record.levelname for record in caplog.records if "recorded" in record.message]
    assert told == ["INFO", "WARNING"]


@pytest.mark.logs("checkpoint not recorded: --next-step")
async def test_a_counter_that_makes_no_step_is_reported_once(patient_clock: MockClock) -> None:
    group, directory = await group_of(), Directory(0)
    watch = Watch(group, Place.parse("/unused"), NextStep("N-1"), look_at=directory.look)
    with trio.move_on_after(10):
        await watch.run()
    assert await group.read() is None


@pytest.mark.logs("checkpoint not recorded: group 'run' would keep 4097")
async def test_more_checkpoints_than_a_record_holds_are_not_recorded(patient_clock: MockClock) -> None:
    """Such a record could be written and never be read again, not even to retire the group."""
    group, directory = await group_of(), Directory(10)
    watch = watch_of(group, directory)
    with trio.move_on_after(5):
        await watch.run()
    directory.counters = set(range(1, KEPT_CHECKPOINTS_MAX + 2))
    with trio.move_on_after(5):
        await watch.run()
    assert await kept(group) == (11,)
    await group.retire()


async def test_a_directory_that_hangs_does_not_keep_the_mount_from_ending() -> None:
    hangs, looked = threading.Event(), threading.Event()

    def look() -> Found:
        looked.set()
        hangs.wait(60)
        return Found(frozenset(), frozenset())

    watch = Watch(await group_of(), Place.parse("/unused"), NextStep("N+1"), look_at=look)
    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.to_thread.run_sync(looked.wait)
        nursery.cancel_scope.cancel()
    with trio.move_on_after(0.2):  # what the unmount allows for it
        await watch.last_look()
    assert time.monotonic() - began < 30
    hangs.set()
