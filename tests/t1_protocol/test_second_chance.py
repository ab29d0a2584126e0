"""A wrong checkpoint, a group retired by mistake: within grace nothing is lost by it (`reclaim --grace`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from doubles.trio_clock import TrioClock
from lakework import reclaim
from process_store import ProcessStore
from producer_world import World
from scenarios import scenario
from small_world import NEED, STEPS, group, grow, process, small

from stepfs.format.control import ControlRecord
from stepfs.format.ids import Step
from stepfs.format.keys import control_prefix, number_of
from stepfs.lake import decisions as decisions_room
from stepfs.lake.control import Control, Group
from stepfs.lake.decisions import successor
from stepfs.lake.reclaim import run as run_room
from stepfs.lake.reclaim.run import Reclaimer, Report

GRACE_S = 3600.0
DAY_MS = 86_400_000
WRONG = STEPS - 1


class WrongClock(TrioClock):
    """A machine's clock that is off by `wrong_ms`."""

    def __init__(self, wrong_ms: int) -> None:
        self.wrong_ms = wrong_ms

    def now_ms(self) -> int:
        return super().now_ms() + self.wrong_ms


async def clean(world: World, *, grace_s: float = GRACE_S, store: ProcessStore | None = None) -> Report:
    return await reclaim(store or process(world, "reclaimer"), world.identity, clock=TrioClock(), grace_s=grace_s)


async def says(world: World, step: int, name: str = "run") -> None:
    await group(world, name).add(Step(step), keep=1)


async def a_wrong_checkpoint(world: World) -> None:
    await says(world, WRONG)
    for _ in range(3):
        await trio.sleep(GRACE_S / 4)
        assert (await clean(world)).first_live_step <= NEED
    await group(world, "run").replace(frozenset({Step(NEED)}))
    await trio.sleep(2 * GRACE_S)
    assert (await clean(world)).first_live_step == NEED


async def retired_by_mistake(world: World) -> None:
    await group(world, "other").add(Step(WRONG))
    await trio.sleep(2 * GRACE_S)
    await group(world, "run").retire()
    await trio.sleep(GRACE_S / 2)
    assert (await clean(world)).first_live_step <= NEED
    await group(world, "run").replace(frozenset({Step(NEED)}))
    await group(world, "other").retire()
    await trio.sleep(3 * GRACE_S)
    assert (await clean(world)).first_live_step == NEED


async def a_first_group_with_a_wrong_number(world: World) -> None:
    """It is the only one: before it was there, every step might still have been needed."""
    await group(world, "run").retire()
    await trio.sleep(2 * GRACE_S)
    await says(world, WRONG, "first")
    await trio.sleep(GRACE_S / 2)
    assert (await clean(world)).first_live_step == 0
    await trio.sleep(GRACE_S)
    assert (await clean(world)).first_live_step == WRONG


async def a_mistake_after_a_right_move(world: World) -> None:
    """The mistake comes inside any await of a reclaimer that may advance otherwise."""
    await says(world, NEED + 1)
    await trio.sleep(2 * GRACE_S)
    for at in range(1, 40):
        store = process(world, f"reclaimer {at}")

        async def mistake() -> None:
            await says(world, WRONG)

        store.inside[at] = mistake
        await clean(world, store=store)
        assert world.ledger.first_live_step <= NEED + 1
        await group(world, "run").replace(frozenset({Step(NEED + 1)}))


async def back_and_forth(world: World) -> None:
    """Each need of the last hour counts, also one that was on record for a moment only."""
    await says(world, WRONG)
    await trio.sleep(2 * GRACE_S)
    for step in (NEED, WRONG, NEED + 2, WRONG):
        await group(world, "run").replace(frozenset({Step(step)}))
        await trio.sleep(1.0)
    await trio.sleep(GRACE_S / 2)
    assert (await clean(world)).first_live_step == NEED
    await trio.sleep(GRACE_S / 2)
    assert (await clean(world)).first_live_step == WRONG


async def clocks_a_day_wrong(world: World) -> None:
    """Only the store's clock counts: one writer lives tomorrow, another yesterday, and so do the reclaimers."""
    for wrong_ms, step in ((DAY_MS, WRONG), (-DAY_MS, WRONG)):
        clock = WrongClock(wrong_ms)
        writer = Group.of(process(world, "writer"), world.identity, "run", clock)
        await writer.replace(frozenset({Step(NEED)}))
        await trio.sleep(2 * GRACE_S)
        await writer.replace(frozenset({Step(step)}))
        await trio.sleep(GRACE_S / 2)
        store = process(world, "reclaimer")
        report = await reclaim(store, world.identity, clock=WrongClock(-wrong_ms), grace_s=GRACE_S)
        assert report.first_live_step == NEED
    await trio.sleep(GRACE_S)
    report = await reclaim(store, world.identity, clock=WrongClock(DAY_MS), grace_s=GRACE_S)
    assert report.first_live_step == WRONG


SCENARIOS: list[Callable[[World], Awaitable[None]]] = [
    a_wrong_checkpoint, retired_by_mistake, a_first_group_with_a_wrong_number, a_mistake_after_a_right_move,
    back_and_forth, clocks_a_day_wrong,
]  # fmt: skip


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        await scenario(world)
        world.ledger.broken.clear()  # promises are not the subject here: groups come and go without telling the ledger

    small(main, on=grow)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_mistake_is_taken_back_within_grace(scenario: Callable[[World], Awaitable[None]]) -> None:
    run(scenario)


def grace_ignored(patch: pytest.MonkeyPatch) -> None:
    """Only the newest record counts."""
    for room in (run_room, decisions_room):
        patch.setattr(room, "least_need", lambda record, _ages, _grace_s: record.need)


def the_past_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A record says nothing of the needs before it."""

    def forgetful(number: int, record: ControlRecord, **changes: Any) -> ControlRecord:
        after = successor(number, record, **changes)
        return replace(after, minima=after.minima[-1:])

    patch.setattr(decisions_room, "successor", forgetful)


def retiring_is_no_change(patch: pytest.MonkeyPatch) -> None:
    """A retired group stops to count at once."""

    def at_once(number: int, record: ControlRecord, **changes: Any) -> ControlRecord:
        after = successor(number, record, **changes)
        gone = record.groups.keys() - after.groups.keys()
        return replace(after, minima=after.minima[-1:]) if gone else after

    patch.setattr(decisions_room, "successor", at_once)


def no_group_is_no_need(patch: pytest.MonkeyPatch) -> None:
    """Before the first group nothing was needed."""
    patch.setattr(
        ControlRecord,
        "need",
        property(lambda record: min((group.need for group in record.groups.values()), default=Step(1 << 40))),
    )


def ages_of_the_records_before(patch: pytest.MonkeyPatch) -> None:
    """A need is as old as the record that said it, not as the one that ended it."""

    async def older(control: Control, grace_s: float) -> dict[int, float]:
        prefix = control_prefix(control.identity.lake_id)
        listed = await control.store.list(prefix, ages=True)
        return {n + 1: entry.age_s for entry in listed if (n := number_of(prefix, entry.key)) is not None}

    patch.setattr(run_room, "ages_of_minima", older)


MUTANTS = [
    (grace_ignored, a_wrong_checkpoint), (grace_ignored, retired_by_mistake),
    (grace_ignored, a_first_group_with_a_wrong_number), (grace_ignored, a_mistake_after_a_right_move),
    (the_past_is_forgotten, back_and_forth), (the_past_is_forgotten, a_wrong_checkpoint),
    (retiring_is_no_change, retired_by_mistake), (no_group_is_no_need, a_first_group_with_a_wrong_number),
    (ages_of_the_records_before, retired_by_mistake),
]  # fmt: skip


@pytest.mark.parametrize(("mutate", "scenario"), MUTANTS)
def test_mutant_of_the_grace_is_found(mutate, scenario, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        run(scenario)


@scenario(small, on=grow)
async def test_a_reclaimer_with_a_shorter_grace_does_not_shorten_anothers(world: World) -> None:
    await says(world, WRONG)
    await trio.sleep(GRACE_S / 2)
    assert (await clean(world, grace_s=GRACE_S / 3)).first_live_step == WRONG
    await trio.sleep(GRACE_S / 3)
    assert (await clean(world)).first_live_step == WRONG, "what is gone is gone"
    await says(world, STEPS)
    await clean(world, grace_s=0.0)
    await group(world, "run").add(Step(STEPS), keep=2)
    assert (await clean(world)).first_live_step == STEPS


@scenario(small, on=grow)
async def test_a_checkpoint_each_second_stays_cheap(world: World) -> None:
    """300 records are younger than the grace. Neither a writer nor a reclaimer that stays pays for them."""
    writer = process(world, "writer")
    store = process(world, "reclaimer")
    reclaimer = Reclaimer(store, world.identity, clock=TrioClock(), grace_s=300.0)
    await reclaimer.run()
    run_group = group(world, "run", writer)
    await run_group.read()
    for second in range(1, 481):
        before = writer.counts.requests
        await run_group.replace(frozenset({Step(NEED + second % 3)}))
        assert writer.counts.requests - before == 3, "a LIST, a look at the next number, and the create"
        if second % 60 == 0:
            before = store.counts.requests
            await reclaimer.run()
            assert store.counts.requests - before <= 20
        await trio.sleep(1.0)
    assert len(world.ledger.control.minima) <= 4
