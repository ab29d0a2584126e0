"""Group changes that land late, go unanswered, or are made by many at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from process_store import ProcessStore
from producer_world import World, feed
from scenarios import scenario
from small_world import (
    NEED,
    STEPS,
    audited,
    checkpoint,
    clean,
    group,
    grow,
    inside_everywhere,
    lands_late,
    process,
    register,
    small,
)

from stepfs.checkpoints.formats import Found, NextStep, Place
from stepfs.checkpoints.watch import Watch
from stepfs.errors import AbsentError, StoreUnreachableError, WithdrawnError
from stepfs.format.control import ControlRecord, GroupRecord
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Step, Version
from stepfs.lake import control as control_room
from stepfs.lake.control import Control, Group
from stepfs.lake.decisions import Add, Advance, Drop, Register, Request, Resume, Retire, Revise, decide, successor
from stepfs.lake.identity import create_lake
from stepfs.store.api import Put

DAY_S = 86_400.0
LAST = STEPS - 1
REQUESTS: list[Request] = [
    Register("late"), Add("run", Step(3)), Add("run", Step(LAST), 1), Add("late", Step(3)), Resume("run", Step(4)),
    Drop("run", Step(NEED)), Revise("run", lambda _: frozenset({Step(LAST)})),
    Retire("run"), Advance(Step(NEED), Version(0), 0),
]  # fmt: skip


def named(request: Request) -> str:
    return type(request).__name__


@pytest.mark.parametrize("request_", REQUESTS, ids=named)
@scenario(small, on=grow)
async def test_a_create_that_lands_a_day_late_changes_nothing_that_was_said_since(world: World, request_: Request):
    await checkpoint(world, "run", NEED + 1, keep=None)
    said = world.ledger.control
    await trio.sleep(DAY_S)
    assert not await lands_late(world, request_)
    control = Control(process(world, "look"), world.identity)
    await control.refresh()
    assert control.record == said
    await follows_up(world)


@pytest.mark.parametrize("request_", REQUESTS, ids=named)
@scenario(small, on=grow)
async def test_a_create_that_lands_a_day_late_on_a_quiet_lake_is_as_good_as_one_in_time(
    world: World, request_: Request
) -> None:
    world.ledger.promises["run"] = 0 if isinstance(request_, Add | Resume) else LAST
    await trio.sleep(DAY_S)
    assert await lands_late(world, request_)
    record = world.ledger.control
    assert record.first_live_step <= record.need
    need = (await clean(world)).first_live_step
    assert need == (record.need if record.groups else 0)


@pytest.mark.parametrize("request_", REQUESTS[:5], ids=named)
def test_a_create_lands_late_inside_any_await_of_a_reclaim(request_: Request) -> None:
    """It lands before the advance, which then loses, or never; what it says is honoured."""
    landed = set()

    async def lands(world: World) -> None:
        if await lands_late(world, request_):
            landed.add(True)
            name = request_.group  # type: ignore[union-attr]
            world.ledger.promises[name] = world.ledger.control.groups[name].need
        else:
            landed.add(False)

    inside_everywhere(grow, clean, lands, follows_up)
    assert landed == {True, False}


async def follows_up(world: World) -> None:
    """Everybody moves to the end, and what is left is what is needed."""
    for name in list(world.ledger.promises):
        await checkpoint(world, name, LAST)
    assert (await clean(world)).first_live_step == LAST
    await audited(world)


async def a_day_passes(world: World) -> None:
    """A trainer goes back if it can, a group joins, a producer commits, another reclaimer runs; and time."""
    await trio.sleep(DAY_S / 2)
    try:
        await checkpoint(world, "run", 3, keep=None)
    except WithdrawnError:
        assert world.ledger.first_live_step > 3
    await register(world, "late")
    await clean(world)
    await trio.sleep(DAY_S / 2)


def test_a_reclaimer_that_sleeps_for_a_day_at_any_await() -> None:
    assert inside_everywhere(grow, clean, a_day_passes, follows_up) > 50


@pytest.mark.parametrize("step", [3, NEED + 1])
def test_a_writer_that_sleeps_for_a_day_at_any_await(step: int) -> None:
    """What it is told is what everybody reads, and what it is refused is on no record."""
    outcomes = set()

    async def adds(world: World, store: ProcessStore) -> None:
        try:
            await checkpoint(world, "run", step, store, keep=None)
        except WithdrawnError:
            outcomes.add("withdrawn")
            assert not any(
                step in record.groups["run"].kept for record in world.ledger.controls if "run" in record.groups
            )
        else:
            outcomes.add("kept")
            record = await group(world, "run").read()
            assert record is not None
            assert step in record.kept

    async def others(world: World) -> None:
        await trio.sleep(DAY_S)
        await checkpoint(world, "run", NEED + 2, keep=None)
        await clean(world)

    assert inside_everywhere(grow, adds, others, follows_up) == 8
    assert outcomes == ({"withdrawn", "kept"} if step < NEED else {"kept"})


class Silent(ProcessStore):
    """Its creates leave and are not answered; they land when the test says so."""

    is_silent = False

    async def create(self, key: str, body: bytes) -> Put:
        if not self.is_silent:
            return await super().create(key, body)
        self.under_way = key, body
        return Put.UNKNOWN


@pytest.mark.parametrize("lands", ["first", "never", "after another's"])
@scenario(small, on=grow)
async def test_an_unanswered_request_and_the_same_again_are_one_record(world: World, lands: str) -> None:
    """The same slot, the same bytes: it is taken once, or lost, before "on record already" is believed."""
    store = Silent(world.shared, actor="trainer")
    trainer = Group.of(store, world.identity, "run", TrioClock())
    store.is_silent = True
    with pytest.raises(StoreUnreachableError, match="may be on record or not"):
        await trainer.add(Step(3))
    with pytest.raises(StoreUnreachableError, match="may be on record or not"):
        await trainer.add(Step(3))
    assert trainer.control.is_unanswered
    store.is_silent = False
    if lands == "first":
        await ProcessStore.create(store, *store.under_way)
    elif lands == "after another's":
        await checkpoint(world, "run", NEED + 1, keep=None)
        assert await ProcessStore.create(store, *store.under_way) is Put.EXISTS
    before = len(world.ledger.controls)
    world.ledger.promises["run"] = 3
    assert 3 in (await trainer.add(Step(3))).kept
    assert not trainer.control.is_unanswered
    # A checkpoint fences: one more record after one that has landed, or was sent again and is there now.
    assert len(world.ledger.controls) - before <= 2
    assert await ProcessStore.create(store, *store.under_way) is Put.EXISTS
    record = await group(world, "run").read()
    assert record is not None
    assert 3 in record.kept
    assert (await clean(world)).first_live_step == 3


@scenario(small, on=grow)
async def test_many_tasks_of_one_process_change_the_lake_at_once_and_each_is_on_record(world: World) -> None:
    """They share one sequence, and none undoes another, also with requests that are lost."""
    control = Control(process(world, "mount"), world.identity, TrioClock())

    async def says(number: int) -> None:
        await Group.on(control, f"g{number % 4}").add(Step(NEED + number % 5))

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(says, number)
    groups = world.ledger.control.groups
    for number in range(20):
        assert NEED + number % 5 in groups[f"g{number % 4}"].kept
    assert world.ledger.control == control.record
    async with world.producer("a") as producer:
        await feed(producer, 10)


class SlowRequests(FaultyStore):
    """Its creates leave, are not answered, and have not arrived yet."""

    def __init__(self, shared):
        super().__init__(shared, actor="slow")
        self.under_way = []

    async def create(self, key, body):
        self.under_way.append((key, body))
        return Put.UNKNOWN


def retire(group):
    return group.retire()


def drop_all_but_newest(group):
    return group.add(Step(90), keep=1)


async def land(slow, store):
    for key, body in slow.under_way:
        await store.create(key, body)


def add(group):
    return group.add(Step(50))


def resumed(group):
    return group.resumed(Step(50))


async def begin_to_watch(group):
    """A mount starts, as after the death of the one that did not get its answer."""
    there = Found(frozenset({50}), frozenset())
    await group.register()
    await Watch(group, Place.parse("/unused"), NextStep("N"), look_at=lambda: there).look_once()


@pytest.mark.parametrize("unanswered", [retire, drop_all_but_newest])
@pytest.mark.parametrize("say", [add, resumed, begin_to_watch])
async def test_what_is_recorded_again_outlives_a_request_that_lands_late(patient_clock, unanswered, say):
    store = FaultyStore()
    identity = await create_lake(store, slices=1, clock=TrioClock())
    group = Group.of(store, identity, "run", TrioClock())
    await group.add(Step(50))
    slow = SlowRequests(store.shared)
    with pytest.raises(StoreUnreachableError):
        await unanswered(Group.of(slow, identity, "run", TrioClock()))
    await say(group)  # on record already
    await land(slow, store)
    assert 50 in (await group.read()).kept


async def test_a_retired_group_that_a_late_request_brings_back_keeps_what_it_says(autojump_clock):
    """A trainer adds a checkpoint to a retired group and dies. Nobody retires what is not there, so nothing is fenced."""
    store = FaultyStore()
    identity = await create_lake(store, slices=1, clock=TrioClock())
    group = Group.of(store, identity, "run", TrioClock())
    await group.add(Step(50))
    await group.retire()
    slow = SlowRequests(store.shared)
    with pytest.raises(StoreUnreachableError):
        await add(Group.of(slow, identity, "run", TrioClock()))
    with pytest.raises(AbsentError, match="never registered, or retired"):
        await group.retire()
    await land(slow, store)
    assert (await group.read()).kept == (50,)
    await group.retire()
    assert await group.read() is None


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


@pytest.mark.parametrize(
    ("starts", "each", "most"), [(8, 9, 20), (32, 16, 32), pytest.param(128, 26, 60, marks=pytest.mark.nightly)]
)
async def test_groups_that_start_together_wait_for_each_other_and_try_seldom(autojump_clock, starts, each, most):
    """Each needs a slot of its own, one after another. A start costs 3 requests, and 4 for each slot lost: of N that start
    at once, each loses about log N. It was 60 requests for each of 128, and 124 for one."""
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
