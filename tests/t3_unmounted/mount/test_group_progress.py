"""A mount that watches beside a counter in another unit, and beside a damaged record."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from controlled import control_keys
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from test_group import OneMount, group_of, mount_of, save

from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify.repair import repair_control


async def started(nursery: trio.Nursery, mount: OneMount) -> OneMount:
    await mount.need.register()
    await nursery.start(mount.need.run)
    return mount


@pytest.mark.logs("resumes at step 19 is held back: no reader of this mount has opened step 18")
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
