"""How far the readers of a group are, kept in its record; and a mount beside a damaged record says so once and goes
on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from controlled import control_keys, newest_control
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from test_group import OneMount, forever, group_of, mount_of, save

from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify.repair import repair_control


async def started(nursery: trio.Nursery, mount: OneMount) -> OneMount:
    await mount.need.register()
    await nursery.start(mount.need.run)
    return mount


async def opened(group: Group) -> int:
    record = await group.read()
    assert record is not None
    return record.opened


async def test_a_mount_that_ends_leaves_behind_how_far_its_readers_were(autojump_clock):
    group = await group_of()
    async with trio.open_nursery() as background:
        mount = await started(background, mount_of(group))
        await trio.sleep(100)
        mount.opened = 12
        background.cancel_scope.cancel()
    assert await opened(group) == 12
    async with trio.open_nursery() as background:
        await started(background, mount_of(group))  # restarts, reads nothing
        background.cancel_scope.cancel()
    assert await opened(group) == 12, "and the next one does not unsay it"


async def test_a_mount_that_alone_sees_the_checkpoints_learns_from_another_that_alone_reads(
    patient_clock, nursery, tmp_path
):
    group = await group_of()
    await started(nursery, mount_of(group, tmp_path))
    reading = await started(nursery, mount_of(group))
    reading.opened = 10
    save(tmp_path, 10)
    await trio.sleep(610)
    record = await group.read()
    assert record is not None
    assert (record.opened, record.kept) == (10, (10,))


async def test_of_many_readers_one_speaks_and_only_while_they_move_on(autojump_clock, nursery):
    group = await group_of()
    mounts = [await started(nursery, mount_of(group)) for _ in range(8)]
    slot = (await newest_control(group.control.store, group.control.identity)).number
    for now in range(10, 1801, 10):
        await trio.sleep(10)
        for number, mount in enumerate(mounts):
            mount.opened = min(now, 1000) - number % 3  # in step, nearly
    newest = (await newest_control(group.control.store, group.control.identity)).number
    assert newest - slot <= 1800 / 300 + 2, "a record in five to ten minutes, whatever the number of mounts"
    assert 998 <= await opened(group) <= 1000


async def test_a_group_that_was_retired_is_not_brought_back_by_its_readers(autojump_clock):
    group = await group_of()
    async with trio.open_nursery() as background:
        mount = await started(background, mount_of(group))
        mount.opened = 12
        await group.retire()
        background.cancel_scope.cancel()
    assert await group.read() is None


async def test_an_ending_waits_five_seconds_at_most_to_say_so(autojump_clock):
    store = FaultyStore()
    async with trio.open_nursery() as background:
        mount = await started(background, mount_of(await group_of(store)))
        mount.opened = 12
        store.get = forever  # type: ignore[method-assign, assignment]
        began = trio.current_time()
        background.cancel_scope.cancel()
    assert trio.current_time() - began == pytest.approx(5)


@pytest.mark.logs("resumes at step 19 is held back: no reader of the group has opened step 18")
async def test_what_a_mount_shows_is_not_moved_by_a_counter_in_another_unit(patient_clock, tmp_path: Path):
    group = await group_of()
    mount = mount_of(group, tmp_path)
    mount.opened = 10
    async with trio.open_nursery() as background:
        await started(background, mount)
        for counter in (8, 19, 900):
            save(tmp_path, counter)
        await trio.sleep(20)
        assert mount.tree.need == 8
        mount.opened = 19
        await trio.sleep(5)
        record = await group.read()
        assert record is not None
        assert record.kept == (8, Step(19))
        (tmp_path / "step-900/.metadata").unlink()
        await trio.sleep(5)
        background.cancel_scope.cancel()


@pytest.mark.logs("cannot read the record of group 'run'.*--repair", "checkpoint not recorded.*--repair")
async def test_a_mount_goes_on_beside_a_damaged_control_record(patient_clock, nursery, tmp_path, caplog):
    store = FaultyStore()
    group = await group_of(store)
    mount = mount_of(group, tmp_path)
    mount.opened = 20
    await mount.need.register()
    await nursery.start(mount.need.run)
    save(tmp_path, 7)
    await trio.sleep(5)
    assert mount.tree.need == 7
    await Group.of(store, group.control.identity, "run", TrioClock()).add(Step(9))
    newest = control_keys(store.shared, group.control.identity)[-1]
    store.shared.put(newest, store.shared.objects[newest][:-1] + b"?")
    save(tmp_path, 8)
    await trio.sleep(60)
    assert mount.tree.need == 7
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2, "once as its group's follower, once as the checkpoints' watcher"
    assert await repair_control(store, group.control.identity, OriginStores(store, pytest.fail)) is not None
    (tmp_path / "step-7/.metadata").unlink()
    await trio.sleep(5)
    assert mount.tree.need == 8, "and what was saved meanwhile is recorded"
    record = await group.read()
    assert record is not None
    assert record.kept == (8,)
