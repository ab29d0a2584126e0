"""Hundreds of nodes that say the same of one group at the same moment: one record, few requests, nobody refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock

from stepfs.checkpoints.formats import Found, NextStep, Place
from stepfs.checkpoints.watch import Watch
from stepfs.errors import AbsentError
from stepfs.format.control import ControlRecord, GroupRecord
from stepfs.format.ids import Step
from stepfs.format.records import LakeIdentity
from stepfs.lake import control as control_room
from stepfs.lake.control import Group
from stepfs.lake.decisions import Request, decide, successor
from stepfs.lake.identity import create_lake

NODES = 256
REQUESTS_EACH = 10


class Herd:
    """The same group, seen from many nodes with a connection each."""

    def __init__(self, shared: ObjectMap, identity: LakeIdentity, nodes: int) -> None:
        self.stores = [FaultyStore(shared, actor=f"node {number}", seed=number) for number in range(nodes)]
        self.groups = [Group.of(store, identity, "run", TrioClock()) for store in self.stores]

    @classmethod
    async def make(cls, nodes: int = NODES) -> Herd:
        store = FaultyStore()
        return cls(store.shared, await create_lake(store, slices=1, clock=TrioClock()), nodes)

    async def together(self, say: Callable[[int, Group], Awaitable[object]]) -> int:
        """Every node says it at once; → requests of all."""
        before = sum(store.counts.requests for store in self.stores)
        async with trio.open_nursery() as nursery:
            for number, group in enumerate(self.groups):
                nursery.start_soon(say, number, group)
        return sum(store.counts.requests for store in self.stores) - before

    async def newest(self) -> tuple[int, GroupRecord | None]:
        """The number of the newest control record, and the group in it."""
        record = await self.groups[0].read()
        return self.groups[0].control.number, record


async def test_watchers_of_one_directory_write_a_checkpoint_once(patient_clock):
    herd = await Herd.make()
    await herd.groups[0].register()
    shown = {10}
    watches = [
        Watch(group, Place.parse("/x"), NextStep("N"), look_at=lambda: Found(frozenset(shown), frozenset()))
        for group in herd.groups
    ]
    for counters, slot in (({10}, 1), ({10, 20}, 2), ({20, 30}, 3)):
        shown.clear()
        shown |= counters
        requests = await herd.together(lambda number, _: watches[number].look_once())
        number, record = await herd.newest()
        assert record is not None
        assert (number, set(record.kept)) == (slot, counters)
        assert requests <= NODES * REQUESTS_EACH


async def _retires(group: Group) -> None:
    with suppress(AbsentError):  # by another
        await group.retire()


@pytest.mark.parametrize("what", ["register", "add", "resumed", "retire"])
async def test_what_many_say_at_once_is_written_once(autojump_clock, what):
    herd = await Herd.make()
    if what != "register":
        await herd.groups[0].register()
    before, _ = await herd.newest()
    said: dict[str, Callable[[int, Group], Awaitable[object]]] = {
        "register": lambda _, group: group.register(),
        "add": lambda _, group: group.add(Step(7), keep=2),
        "resumed": lambda _, group: group.resumed(Step(7)),
        "retire": lambda _, group: _retires(group),
    }
    requests = await herd.together(said[what])
    after, _ = await herd.newest()
    # Who looks after the first record has landed takes a slot of its own, so that nothing older can come after it.
    assert before + 1 <= after <= before + (4 if what in {"register", "add", "resumed"} else 1)
    assert requests <= NODES * REQUESTS_EACH


async def test_the_herd_finds_a_writer_that_rewrites_what_is_said_already(autojump_clock, monkeypatch):
    """The mistake put back: a loser writes a record that differs in nothing but its id."""

    def always(number: int, record: ControlRecord, request: Request) -> ControlRecord:
        return decide(number, record, request) or successor(number, record)

    monkeypatch.setattr(control_room, "decide", always)
    monkeypatch.setattr(control_room, "_ROUNDS_MAX", 1000)  # here each round has one winner
    few = 96
    herd = await Herd.make(few)
    assert await herd.together(lambda _, group: group.add(Step(7))) > few * REQUESTS_EACH
    assert (await herd.newest())[0] > few / 2


@pytest.mark.parametrize(("starts", "each", "most"), [(8, 9, 20), (32, 16, 32), (128, 26, 60)])
async def test_groups_that_start_together_wait_for_each_other_and_try_seldom(autojump_clock, starts, each, most):
    """Each needs a slot of its own, one after another. A start costs 3 requests, and 4 for each slot lost: of N that start
    at once, each loses about log N. It was 60 requests for each of 128, and 124 for one.
    """
    herd = await Herd.make(starts)
    for number, store in enumerate(herd.stores):
        store._latency = lambda _verb, _size, rng: 0.03 * rng.uniform(0.5, 2.0)
        herd.groups[number] = Group.of(store, herd.groups[0].control.identity, f"run-{number}", TrioClock())
    requests = await herd.together(lambda _, group: group.register())
    await herd.groups[0].read()
    assert len(herd.groups[0].control.groups) == starts
    assert herd.groups[0].control.number == starts - 1
    assert requests <= starts * each
    assert max(store.counts.requests for store in herd.stores) <= most


async def test_a_change_gets_through_beside_one_who_changes_without_a_pause(autojump_clock):
    """A decision that waited before its create lost its slot each time: sixty-four times in a row, and was refused."""
    herd = await Herd.make(2)
    done = trio.Event()

    async def without_a_pause() -> None:
        step = 0
        while not done.is_set():
            step += 1
            await herd.groups[0].add(Step(step), keep=1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(without_a_pause)
        with trio.fail_after(30):
            for step in range(20):
                await herd.groups[1].add(Step(10_000 + step))
        done.set()
