"""A directory of checkpoints and the group that follows it: what is recorded, doubted, and kept."""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from controlled import reclaimed_below
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from trio.testing import MockClock

from stepfs.checkpoints.formats import Found, NextStep, Place
from stepfs.checkpoints.watch import Progress, Watch, WatchState
from stepfs.errors import AbsentError, UsageError
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

        self.entry = ""

    def look(self) -> Found:
        if self.error is not None:
            raise self.error
        if self.counters is None:
            raise AbsentError("away")
        return Found(frozenset(self.counters), frozenset(self.barred), self.entry)


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


@pytest.mark.logs("nothing is recorded: /unused holds 'epoch7.bin' and no complete checkpoint")
async def test_a_layout_that_nobody_knows_is_told_once(patient_clock: MockClock, nursery, caplog) -> None:
    group, directory = await group_of(), Directory()
    watch = watch_of(group, directory)
    nursery.start_soon(watch.run)
    await trio.sleep(300)
    directory.entry = "epoch7.bin"
    await trio.sleep(50)
    assert not caplog.records, "an empty directory, and one that has not held other things for long"
    await trio.sleep(300)
    directory.counters = {7}
    await trio.sleep(2)
    directory.counters = set()
    await trio.sleep(300)
    assert [record.levelname for record in caplog.records if "no complete checkpoint" in record.message] == ["WARNING"]
    late = watch_of(group, directory)
    assert not await late.last_look()
    assert "no complete checkpoint" in caplog.records[-1].message, "a trainer that has ended saves no more"


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


@dataclass
class Node:
    """One mount that watches a directory: what is there, and what it knows of the group's readers."""

    group: Group
    counters: set[int] = field(default_factory=set)
    committed: int = 60
    opened: int = 60
    astray: str = ""

    def __post_init__(self) -> None:
        self.watch = Watch(
            self.group, Place.parse("/unused"), NextStep("N"),
            look_at=lambda: Found(frozenset(self.counters), frozenset()), progress=self.progress,
            decide=self.decide,
        )  # fmt: skip
        self.order_needs_from: Step | None = None
        self.record: dict[str, Any] = {}  # for the next daemon

    def decide(self, state: Mapping[str, object]) -> None:
        self.record = dict(state)

    def progress(self) -> Progress:
        return Progress(Step(self.committed), Step(self.opened), self.order_needs_from, astray=self.astray)

    async def kept(self) -> tuple[Step, ...]:
        await self.watch.look_once()
        record = await self.group.read()
        return record.kept if record is not None else ()


async def node_of() -> Group:
    store = FaultyStore()
    group = Group.of(store, await create_lake(store, slices=1, clock=TrioClock()), "run", TrioClock())
    await group.register()
    return group


def told(caplog: pytest.LogCaptureFixture, *texts: str) -> list[int]:
    """How many warnings there were with each of the texts."""
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [sum(text in warning for warning in warnings) for text in texts]


@pytest.mark.logs("resumes at step 900 is held back: only 60 steps are committed")
async def test_a_counter_beyond_what_is_committed_is_held_back_until_it_is_not(patient_clock, caplog):
    node = Node(await node_of(), {20, 900})
    assert await node.kept() == (20,)
    for _ in range(100):
        await trio.sleep(1)
        assert await node.kept() == (20,)
    assert told(caplog, "resumes at step 900 is held back") == [1], "once"
    node.committed = node.opened = 900
    assert await node.kept() == (20, 900)


async def test_all_that_is_committed_may_be_a_checkpoint_and_a_commit_a_moment_ago_is_no_doubt(patient_clock, caplog):
    """The trainer's node knows of a step before this one does: that is not worth a warning."""
    node = Node(await node_of(), {60, 61})
    assert await node.kept() == (60,)
    await trio.sleep(2)
    node.committed = node.opened = 61
    assert await node.kept() == (60, 61)
    assert told(caplog, "") == [0]


@pytest.mark.logs(
    "resumes at step 55 is held back: no reader of this mount has opened step 54 yet.*`stepfs checkpoint`"
)
async def test_a_counter_that_no_reader_has_reached_is_held_back_until_one_has(patient_clock, caplog):
    node = Node(await node_of(), {10, 55}, opened=10)
    assert await node.kept() == (10,)
    node.opened = 54
    assert await node.kept() == (10,)
    assert told(caplog, "held back") == [1]
    node.opened = 55
    assert await node.kept() == (10, 55)


@pytest.mark.logs("held back")
async def test_nothing_is_recorded_while_readers_have_had_steps_that_the_lake_has_lost(patient_clock, caplog):
    """Its checkpoints are of the former history, and would release steps of the present one that nobody has read."""
    node = Node(await node_of(), {10})
    assert await node.kept() == (10,)
    node.counters.add(50)
    node.astray = "another history: the log has lost version 7"
    assert await node.kept() == (10,)
    assert told(caplog, "held back: another history") == [1]
    node.astray = ""
    assert await node.kept() == (10, 50)


@pytest.mark.logs("held back")
async def test_a_mount_waits_for_its_first_reader_before_it_says_so(patient_clock, caplog):
    node = Node(await node_of(), {55}, opened=0)
    assert await node.kept() == ()
    await trio.sleep(800)
    assert await node.kept() == ()
    assert told(caplog, "held back") == [0]
    await trio.sleep(200)
    assert await node.kept() == ()
    assert told(caplog, "held back") == [1]
    node.opened = 55
    assert await node.kept() == (55,)


@pytest.mark.logs("held back")
async def test_at_the_end_of_a_mount_what_it_holds_back_is_said(patient_clock, caplog):
    node = Node(await node_of(), {55}, opened=0)
    assert await node.watch.last_look() == ""
    assert told(caplog, "held back") == [1]


async def test_what_is_kept_already_is_not_doubted_and_not_dropped(patient_clock, caplog):
    node = Node(await node_of(), {55}, opened=10)
    await node.group.add(Step(55))
    assert await node.kept() == (55,)
    node.counters = set()
    assert await node.kept() == (), "and it is followed like any other"
    assert told(caplog, "") == [0]


@pytest.mark.logs("resumes at step 10 is not recorded, because steps that it needs are reclaimed")
async def test_a_late_checkpoint_is_left_out_and_stops_no_other(patient_clock, caplog):
    group = await node_of()
    await group.add(Step(40), keep=1)
    await reclaimed_below(group.control.store, group.control.identity, 30)
    node = Node(group, {10, 40, 50})
    assert await node.kept() == (40, 50)
    store = group.control.store
    assert isinstance(store, FaultyStore)
    requests = store.counts.requests
    for _ in range(10):
        await trio.sleep(6.1)
        await node.watch.look_once()
    assert store.counts.requests == requests, "what is late costs nothing more"
    node.counters = {10, 50, 60}
    assert await node.kept() == (50, 60)
    assert told(caplog, "resumes at step 10 is not recorded") == [1]


@pytest.mark.logs("resumes at step 10 is not recorded", "resumes at step 20 is not recorded")
async def test_a_checkpoint_restored_from_a_backup_comes_too_late_and_is_said_once(patient_clock, caplog):
    group = await node_of()
    node = Node(group, {40})
    assert await node.kept() == (40,)
    await reclaimed_below(group.control.store, group.control.identity, 30)
    for counters in ({10, 20, 40}, {10, 40}, {40}, {40, 50}):
        node.counters = counters
        assert await node.kept() == tuple(sorted(counters - {10, 20}))
    assert told(caplog, "step 10 is not", "step 20 is not") == [1, 1]


@pytest.mark.logs("--next-step 'N-1' makes -1 of checkpoint 0")
async def test_a_counter_that_makes_no_step_stops_no_other(patient_clock):
    group = await node_of()
    watch = Watch(group, Place.parse("/x"), NextStep("N-1"), look_at=lambda: Found(frozenset({0, 6}), frozenset()))
    await watch.look_once()
    record = await group.read()
    assert record is not None
    assert record.kept == (5,)


async def test_a_roll_back_that_somebody_records_meanwhile_is_not_undone(patient_clock):
    """The watcher says what changed on its disk; it does not set the group back to what it has read before."""
    group = await node_of()
    node = Node(group, {40, 50})
    assert await node.kept() == (40, 50)
    store = group.control.store
    get = store.get

    async def interrupted(key: str, **options: int) -> bytes | None:
        found = await get(key, **options)
        store.get = get  # type: ignore[method-assign]
        await Group.of(store, group.control.identity, "run", TrioClock()).resumed(Step(20))
        return found

    store.get = interrupted  # type: ignore[method-assign]
    node.counters = {50, 60}
    assert await node.kept() == (20, 50, 60)


async def trainer_of(*kept: int) -> Group:
    store = FaultyStore()
    group = Group.of(store, await create_lake(store, slices=1, clock=TrioClock()), "run", TrioClock())
    for step in kept:
        await group.add(Step(step))
    return group


async def record_of(group: Group) -> list[int]:
    record = await group.read()
    assert record is not None
    return list(record.kept)


async def trains(group: Group, steps: Sequence[int], *, keep: int) -> list[list[int]]:
    seen = []
    for step in steps:
        await group.add(Step(step), keep=keep)
        seen.append(await record_of(group))
        assert step in seen[-1], "what was just recorded is never lost"
    return seen


async def test_a_checkpoint_after_a_roll_back_is_kept_until_the_trainer_passes_the_greater_ones(autojump_clock):
    group = await trainer_of(90, 100)
    await group.add(Step(40))
    assert await record_of(group) == [40, 90, 100]
    assert await trains(group, [50, 60, 90, 95, 105], keep=2) == [
        [40, 50, 90, 100], [50, 60, 90, 100], [60, 90, 100], [90, 95, 100], [95, 105],
    ]  # fmt: skip


async def test_a_trainer_that_resumes_from_an_older_checkpoint_keeps_that_and_not_the_branch_it_left(autojump_clock):
    """Three are kept; of {90, 100} the trainer resumed from 90: 100 is older news than 90, whatever its number."""
    group = await trainer_of(90, 100)
    record = await group.resumed(Step(90))
    assert (record.kept, record.order) == ((90, 100), (100, 90))
    assert await trains(group, [95, 105], keep=3) == [[90, 95, 100], [90, 95, 105]]


async def test_resuming_drops_nothing_and_brings_back_what_was_dropped(autojump_clock):
    group = await trainer_of(40, 50, 90, 100)
    record = await group.resumed(Step(50))
    assert record.order == (90, 100, 40, 50)
    record = await group.resumed(Step(45))
    assert record.order == (90, 100, 50, 40, 45)
    again = await group.resumed(Step(45))
    assert again == record, "saying it twice changes nothing"


async def test_without_keep_the_order_is_kept_too_and_dropping_does_not_disturb_it(autojump_clock):
    group = await trainer_of(10, 20, 15, 30)
    await group.drop(Step(20))
    record = await group.add(Step(40), keep=2)
    assert record.order == (30, 40)
    record = await (await trainer_of(10, 30, 20)).add(Step(25), keep=2)
    assert (record.kept, record.order) == ((20, 25, 30), (30, 20, 25))


async def test_the_order_of_recording_is_what_every_other_process_reads(autojump_clock):
    group = await trainer_of(100, 40)
    other = Group.of(group.control.store, group.control.identity, "run", TrioClock())
    record = await other.read()
    assert record == await group.read()
    assert (record.kept, record.recorded) == ((40, 100), (100, 40))
    record = await other.replace(frozenset({Step(40), Step(90), Step(100)}))
    assert record.order == (100, 40, 90), "what is new comes last"
    record = await (await trainer_of(40, 90, 100)).read()
    assert (record.recorded, record.order) == ((), (40, 90, 100)), "ascending goes without saying"


async def test_keep_zero_is_refused(autojump_clock):
    with pytest.raises(UsageError, match="keep at least one"):
        await (await trainer_of()).add(Step(1), keep=0)


def followed_by(node: Node) -> Node:
    """The mount's next daemon; the one before was killed, and what it decided is JSON."""
    follower = Node(node.group, set(node.counters), node.committed, node.opened)
    follower.order_needs_from, follower.record = node.order_needs_from, dict(node.record)
    follower.watch.inherit(WatchState(**json.loads(json.dumps(node.record))))
    return follower


@pytest.mark.logs("resumes at step 30 is held back: NEXT 30: readers go through")
async def test_what_is_held_back_for_good_is_so_at_the_next_daemon_and_told_once(patient_clock, caplog) -> None:
    node = Node(await group_of(), {20, 30})
    node.order_needs_from = Step(20)
    assert await node.kept() == (20,)
    for _ in range(2):
        node = followed_by(node)
        node.order_needs_from = None  # the epoch has ended
        node.counters.add(60)
        assert await node.kept() == (20, 60)
    assert len([record for record in caplog.records if "held back" in record.message]) == 1


@pytest.mark.logs("held back")
async def test_what_is_held_back_is_on_record_before_the_others_are_recorded(patient_clock) -> None:
    node = Node(await group_of(), {20, 30})
    node.order_needs_from = Step(20)
    known = []
    revise = Group.revise

    async def noted(*arguments: Any, **named: Any) -> Any:
        known.append(dict(node.record["out_of_order"]))
        return await revise(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "revise", noted)
        await node.kept()
    assert [list(one) for one in known] == [["30"]]


async def test_a_checkpoint_that_was_recorded_by_hand_stays_at_the_next_daemon(patient_clock) -> None:
    node = Node(await group_of(), {8})
    assert await node.kept() == (8,)
    await node.group.add(Step(4))
    node = followed_by(node)
    assert await node.kept() == (4, 8)
    node.counters = {9}
    assert await node.kept() == (4, 9)


async def test_a_retired_group_is_not_revived_by_what_the_daemon_before_has_seen(patient_clock) -> None:
    node = Node(await group_of(), {8})
    await node.kept()
    await node.group.retire()
    node = followed_by(node)
    assert await node.kept() == ()
    node.counters.add(9)
    assert 9 in await node.kept()


async def test_of_another_directory_the_daemon_before_has_seen_nothing(patient_clock) -> None:
    node = Node(await group_of(), {8})
    await node.kept()
    other = Node(node.group, {9})
    other.watch.inherit(WatchState(**{**node.record, "of": "/elsewhere  N"}))
    assert await other.kept() == (9,)


async def test_a_watch_that_rests_neither_looks_nor_settles(patient_clock, nursery) -> None:
    node = Node(await group_of(), {8})
    node.watch.rests = True
    nursery.start_soon(node.watch.run)
    await trio.sleep(10)
    assert await node.group.read() is None
    node.watch.rests = False
    await trio.sleep(10)
    assert await node.group.read() is not None
