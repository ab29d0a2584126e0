"""A mount and its group: the need it follows, the checkpoints it settles at the end, what it says to the fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from controlled import control_keys, newest_control
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from fakemount import facts_of
from faketable import FakeTable

from stepfs.checkpoints.formats import NextStep, Place
from stepfs.errors import StoreUnreachableError
from stepfs.follow.follower import Follower
from stepfs.follow.parts import INTERVAL_S, GroupFollower, GroupState
from stepfs.format.ids import Step
from stepfs.format.keys import node_key, nodes_prefix
from stepfs.format.node import NodeRecord, node_name
from stepfs.lake.control import Control, Group
from stepfs.lake.fleet import BEAT_S, FleetLook, list_nodes, write_node
from stepfs.lake.identity import create_lake
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify.repair import repair_control
from stepfs.mount.fuse.guard import Meter
from stepfs.mount.options import MountOptions
from stepfs.mount.status import Heartbeat
from stepfs.view.tree import Tree, ViewOptions


@dataclass
class OneMount:
    tree: Tree
    changes: list[float]
    need: GroupFollower = field(init=False)
    opened: int = 0  # one past the greatest step that a reader of it has opened


async def group_of(store: FaultyStore | None = None) -> Group:
    store = store or FaultyStore()
    return Group.of(store, await create_lake(store, slices=1, clock=TrioClock()), "run", TrioClock())


def mount_of(group: Group, checkpoint_dir: Path | None = None) -> OneMount:
    table = FakeTable()
    table.commit(20)
    tree = Tree(table, ViewOptions())
    changes: list[float] = []
    checkpoints = None if checkpoint_dir is None else (Place(checkpoint_dir), NextStep("N"))
    mount = OneMount(tree, changes)
    mount.need = GroupFollower(
        group, tree, lambda: changes.append(trio.current_time()), checkpoints=checkpoints,
        opened_here=lambda: Step(mount.opened),
    )  # fmt: skip
    return mount


async def test_every_mount_of_the_group_follows_within_a_second(autojump_clock, nursery):
    group = await group_of()
    mounts = [mount_of(group) for _ in range(3)]
    for mount in mounts:
        await mount.need.register()
        await nursery.start(mount.need.run)
    await trio.sleep(30.5)
    for kept, drop, need in [(7, None, 7), (9, None, 7), (12, 7, 9), (3, None, 3)]:
        await group.add(Step(kept))
        if drop is not None:
            await group.drop(Step(drop))
            await trio.sleep(10 * INTERVAL_S)  # two records at once: the slot after the one known stays empty
        await trio.sleep(INTERVAL_S + 0.1)
        assert [mount.tree.need for mount in mounts] == [need] * 3
    assert all(len(mount.changes) == 3 for mount in mounts)


async def test_following_costs_one_small_request_a_look_and_one_a_minute(autojump_clock, nursery):
    store = FaultyStore()
    mount = mount_of(await group_of(store))
    await mount.need.register()
    await nursery.start(mount.need.run)
    await trio.sleep(0.5)
    lists, gets, requests = store.counts.list, store.counts.get, store.counts.requests
    await trio.sleep(100 * INTERVAL_S)
    assert store.counts.list == lists
    assert store.counts.get - gets == store.counts.requests - requests
    assert 100 <= store.counts.get - gets <= 101, "it reads the record that it knows once a minute (hazard 13)"


def save(directory: Path, counter: int) -> None:
    (directory / f"step-{counter}").mkdir()
    (directory / f"step-{counter}/.metadata").write_bytes(b"x")


async def test_a_checkpoint_written_right_before_the_end_is_recorded(patient_clock, tmp_path):
    group = await group_of()
    mount = mount_of(group, tmp_path)
    mount.opened = 4
    await mount.need.register()
    async with trio.open_nursery() as background:
        await background.start(mount.need.run)
        await trio.sleep(5)
        save(tmp_path, 4)
        background.cancel_scope.cancel()
    assert (await group.read()).kept == (4,)


async def test_a_checkpoint_dropped_by_hand_comes_back_while_the_directory_holds_it(patient_clock, tmp_path):
    """And costs one request: the mount follows its group's record anyway."""
    group = await group_of()
    mount = mount_of(group, tmp_path)
    mount.opened = 8
    await mount.need.register()
    async with trio.open_nursery() as background:
        await background.start(mount.need.run)
        save(tmp_path, 4)
        save(tmp_path, 8)
        await trio.sleep(5)
        await group.drop(Step(4))
        dropped = (await newest_control(group.control.store, group.control.identity)).number
        await trio.sleep(5)
        assert mount.tree.need == 4
        await trio.sleep(60)
        assert (await newest_control(group.control.store, group.control.identity)).number == dropped + 1
        (tmp_path / "step-4/.metadata").unlink()
        await trio.sleep(5)
        assert mount.tree.need == 8
        background.cancel_scope.cancel()


@pytest.mark.parametrize(("ranks", "watches"), [(None, True), ((0, 1), True), ((2, 3), False)])
def test_the_mount_with_rank_0_watches_for_all(ranks, watches):
    options = MountOptions(lake="file:///x", directory=Path("/m"), group="g", ranks=ranks, checkpoint_dir="/ckpts")
    assert options.watched_dir == ("/ckpts" if watches else None)


async def test_a_checkpoint_written_again_counts_again(patient_clock, tmp_path):
    group = await group_of()
    mount = mount_of(group, tmp_path)
    mount.opened = 8
    await mount.need.register()
    for counter in (4, 6):
        save(tmp_path, counter)
    async with trio.open_nursery() as background:
        await background.start(mount.need.run)
        for gone, there in ((True, 6), (False, 4)):
            await trio.sleep(5)
            if gone:
                (tmp_path / "step-4/.metadata").unlink()
            else:
                (tmp_path / "step-4/.metadata").write_bytes(b"x")
            await trio.sleep(5)
            assert mount.tree.need == there
        background.cancel_scope.cancel()


@pytest.mark.logs("last checkpoints may not be recorded")
async def test_an_ending_does_not_wait_for_ever_for_a_store_that_is_away(patient_clock, tmp_path):
    store = FaultyStore()
    mount = mount_of(await group_of(store), tmp_path)
    mount.opened = 4
    await mount.need.register()
    async with trio.open_nursery() as background:
        await background.start(mount.need.run)
        await trio.sleep(5)
        store.get = forever  # type: ignore[method-assign, assignment]
        save(tmp_path, 4)
        began = trio.current_time()
        background.cancel_scope.cancel()
    assert trio.current_time() - began == pytest.approx(10)


async def forever(*_args: object, **_options: object) -> None:
    await trio.sleep_forever()


class Beating:
    """The parts of a mount that its node record is made of."""

    def __init__(self, store: FaultyStore) -> None:
        self.options = MountOptions(lake="file:///x", directory=Path("/mnt/run"), group="run")
        self.store = store
        self.meter = Meter()
        self.table = FakeTable()
        self.follower = Follower(self.table, None, poll_s=1, find_lake_id=forever, on_change=lambda: None)

    def heartbeat(self, identity) -> Heartbeat:
        return Heartbeat(
            self.store, identity, "run", directory=self.options.directory, facts=lambda: facts_of(self.follower, self.meter),
            has_read=lambda: self.meter.last_step is not None,
        )  # fmt: skip


async def test_a_mount_speaks_every_30_s_and_is_silent_once_it_ended(autojump_clock):
    store = FaultyStore()
    identity = (await group_of(store)).control.identity
    mount = Beating(store)
    async with trio.open_nursery() as background:
        await background.start(mount.heartbeat(identity).run)
        await trio.sleep(1)
        (first,) = await list_nodes(store, identity, ["run"])
        assert (first.directory, first.frontier, first.last_step) == ("/mnt/run", -1, None)
        mount.table.commit(5)
        mount.meter.last_step = Step(3)
        await trio.sleep(2)
        (record,) = await list_nodes(store, identity, ["run"])
        assert record.last_step == 3, "the first read is news"
        await trio.sleep(BEAT_S)
        puts = store.counts.put
        await trio.sleep(10 * BEAT_S)
        assert store.counts.put - puts == 10
        (record,) = await list_nodes(store, identity, ["run"])
        assert (record.frontier, record.last_step) == (4, 3)
        background.cancel_scope.cancel()
    assert await list_nodes(store, identity, ["run"]) == []
    assert await store.list(nodes_prefix(identity.lake_id)) == []


async def test_a_mount_whose_store_is_away_serves_on_and_ends_in_time(autojump_clock):
    store = FaultyStore()
    identity = (await group_of(store)).control.identity
    mount = Beating(store)

    async def away(*_args: object) -> None:
        raise StoreUnreachableError("away")

    async with trio.open_nursery() as background:
        await background.start(mount.heartbeat(identity).run)
        await trio.sleep(1)
        mount.store.put = away  # type: ignore[method-assign]
        await trio.sleep(100)
        mount.store.delete = forever  # type: ignore[method-assign]
        began = trio.current_time()
        background.cancel_scope.cancel()
    assert trio.current_time() - began == pytest.approx(5)


def test_the_share_waited_is_of_the_time_and_not_of_the_requests(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    mount = Beating(FaultyStore())
    node = mount.heartbeat(None)
    waited = mount.meter.waited
    waited.began()
    waited.began()  # two at once wait no longer than one
    now[0] += 2
    waited.ended()
    waited.ended()
    now[0] += 5
    waited.began()
    now[0] += 1  # and waits still
    assert node.record().waited_permille == round(1000 * 3 / 8)
    now[0] += 4
    assert node.record().waited_permille == 1000
    waited.ended()
    now[0] += 4
    assert node.record().waited_permille == 0


async def test_of_the_groups_there_are_and_unreadable_ones_inform_nobody(autojump_clock):
    store = FaultyStore()
    identity = (await group_of(store)).control.identity
    usual = NodeRecord("run", "a", "/mnt", 1, "1", Step(1), Step(0), 0, 0)
    other = NodeRecord("gone", "b", "/mnt", 1, "1", Step(1), Step(0), 0, 0)
    for record in (usual, other):
        await write_node(store, identity, record)
    await store.put(node_key(identity.lake_id, "run", node_name("c", "/mnt")), [b"junk"])
    assert await list_nodes(store, identity, ["run", "gone"]) == [other, usual]
    assert await list_nodes(store, identity, ["run", "new"]) == [usual]


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


async def test_a_daemon_that_follows_registers_nothing(patient_clock):
    group = await group_of()
    mount, decided = mount_of(group), {}
    mount.need.decide = decided.update
    await mount.need.register()
    await group.add(Step(7))
    await mount.need.look()
    assert decided["group"] == {"name": "run", "need": 7}
    await group.retire()
    follower, retired = mount_of(Group.on(Control(group.control.store, group.control.identity), "run")), []
    follower.need.on_retired = lambda: retired.append(True)
    await follower.need.go_on(GroupState(**decided["group"]))
    assert (follower.tree.need, retired, await group.read()) == (7, [True], None)
    await group.add(Step(9))  # by hand: it is there again
    await follower.need.look()
    assert follower.tree.need == 9


@pytest.mark.logs("cannot read the record of group 'run'")
async def test_a_daemon_that_follows_goes_on_from_the_need_that_was_known(patient_clock):
    """The newest record is damaged, or that of another history: what the one before has hidden stays hidden."""
    store = FaultyStore()
    group = await group_of(store)
    await mount_of(group).need.register()
    follower = mount_of(Group.on(Control(store, group.control.identity), "run"))
    follower.need.astray = lambda: "another history"
    await follower.need.go_on(GroupState("run", 5))
    assert (follower.tree.need, follower.changes) == (5, [])
    key = group.control.key(group.control.number)
    await store.delete([key])
    await store.create(key, b"damaged")
    follower.need.astray = lambda: ""
    await follower.need.go_on(GroupState("run", 6))
    assert follower.tree.need == 6


async def test_who_watches_reads_the_records_as_often_as_they_are_written(autojump_clock) -> None:
    store = FaultyStore()
    identity = (await group_of(store)).control.identity
    for number in range(20):
        await write_node(store, identity, NodeRecord("run", f"node-{number}", "/m", 1, "1", Step(1), Step(0), 0, 0))
    fleet, before = FleetLook(store, identity), store.counts.requests
    for _ in range(60):
        assert len(await fleet.nodes(["run"])) == 20
        await trio.sleep(1.0)
    assert store.counts.requests - before == 2 * 21
    assert await fleet.nodes(["run", "other"]) == await list_nodes(store, identity, ["run"])
