"""A watched directory says what cannot be: counters in another unit, of another run, or whose steps are reclaimed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
import trio
from controlled import reclaimed_below
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock

from stepfs.checkpoints.formats import Found, NextStep, Place
from stepfs.checkpoints.watch import Progress, Watch
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake


@dataclass
class Node:
    """One mount that watches a directory: what is there, and what it knows of the group's readers."""

    group: Group
    counters: set[int] = field(default_factory=set)
    committed: int = 60
    opened: int = 60

    def __post_init__(self) -> None:
        self.watch = Watch(
            self.group, Place.parse("/unused"), NextStep("N"),
            look_at=lambda: Found(frozenset(self.counters), frozenset()), progress=self.progress,
        )  # fmt: skip

    def progress(self) -> Progress:
        return Progress(Step(self.committed), Step(self.opened))

    async def kept(self) -> tuple[Step, ...]:
        await self.watch.look_once()
        record = await self.group.read()
        return record.kept if record is not None else ()


async def group_of() -> Group:
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
    node = Node(await group_of(), {20, 900})
    assert await node.kept() == (20,)
    for _ in range(100):
        await trio.sleep(1)
        assert await node.kept() == (20,)
    assert told(caplog, "resumes at step 900 is held back") == [1], "once"
    node.committed = node.opened = 900
    assert await node.kept() == (20, 900)


async def test_all_that_is_committed_may_be_a_checkpoint_and_a_commit_a_moment_ago_is_no_doubt(patient_clock, caplog):
    """The trainer's node knows of a step before this one does: that is not worth a warning."""
    node = Node(await group_of(), {60, 61})
    assert await node.kept() == (60,)
    await trio.sleep(2)
    node.committed = node.opened = 61
    assert await node.kept() == (60, 61)
    assert told(caplog, "") == [0]


@pytest.mark.logs(
    "resumes at step 55 is held back: no reader of this mount has opened step 54 yet.*`stepfs checkpoint`"
)
async def test_a_counter_that_no_reader_has_reached_is_held_back_until_one_has(patient_clock, caplog):
    node = Node(await group_of(), {10, 55}, opened=10)
    assert await node.kept() == (10,)
    node.opened = 54
    assert await node.kept() == (10,)
    assert told(caplog, "held back") == [1]
    node.opened = 55
    assert await node.kept() == (10, 55)


@pytest.mark.logs("held back")
async def test_a_mount_waits_for_its_first_reader_before_it_says_so(patient_clock, caplog):
    node = Node(await group_of(), {55}, opened=0)
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
    node = Node(await group_of(), {55}, opened=0)
    assert await node.watch.last_look() == ""
    assert told(caplog, "held back") == [1]


async def test_what_is_kept_already_is_not_doubted_and_not_dropped(patient_clock, caplog):
    node = Node(await group_of(), {55}, opened=10)
    await node.group.add(Step(55))
    assert await node.kept() == (55,)
    node.counters = set()
    assert await node.kept() == (), "and it is followed like any other"
    assert told(caplog, "") == [0]


@pytest.mark.logs("resumes at step 10 is not recorded, because steps that it needs are reclaimed")
async def test_a_late_checkpoint_is_left_out_and_stops_no_other(patient_clock, caplog):
    group = await group_of()
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
    group = await group_of()
    node = Node(group, {40})
    assert await node.kept() == (40,)
    await reclaimed_below(group.control.store, group.control.identity, 30)
    for counters in ({10, 20, 40}, {10, 40}, {40}, {40, 50}):
        node.counters = counters
        assert await node.kept() == tuple(sorted(counters - {10, 20}))
    assert told(caplog, "step 10 is not", "step 20 is not") == [1, 1]


@pytest.mark.logs("--next-step 'N-1' makes -1 of checkpoint 0")
async def test_a_counter_that_makes_no_step_stops_no_other(patient_clock):
    group = await group_of()
    watch = Watch(group, Place.parse("/x"), NextStep("N-1"), look_at=lambda: Found(frozenset({0, 6}), frozenset()))
    await watch.look_once()
    record = await group.read()
    assert record is not None
    assert record.kept == (5,)


async def test_a_roll_back_that_somebody_records_meanwhile_is_not_undone(patient_clock):
    """The watcher says what changed on its disk; it does not set the group back to what it has read before."""
    group = await group_of()
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
