"""A process that sleeps for a day between any two requests, and a request that lands a day late: nothing is undone by it.

A create succeeds only if the record that it was decided on is still the newest (lake/control.py).
"""

from __future__ import annotations

import pytest
import trio
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

from stepfs.errors import StoreUnreachableError, WithdrawnError
from stepfs.format.ids import Step, Version
from stepfs.lake.control import Control, Group
from stepfs.lake.decisions import Add, Advance, Drop, Register, Request, Resume, Retire, Revise
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
