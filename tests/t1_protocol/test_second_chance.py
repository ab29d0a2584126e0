"""A wrong checkpoint, a group retired by mistake: within grace nothing is lost by it (`reclaim --grace`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from doubles.trio_clock import TrioClock
from process_store import ProcessStore
from producer_world import World
from small_world import NEED, STEPS, group, grow, process, small
from stepfs.lake.floor import Floor

from stepfs.format.ids import Step
from stepfs.format.keys import group_prefix
from stepfs.lake import group_records, group_sequence
from stepfs.lake.reclaim import groups as groups_room
from stepfs.lake.reclaim import plan as plan_room
from stepfs.lake.reclaim.plan import GroupEvidence
from stepfs.lake.reclaim.report import Report
from stepfs.lake.reclaim.run import Reclaimer, reclaim

GRACE_S = 3600.0
WRONG = STEPS - 1


async def clean(world: World, *, grace_s: float = GRACE_S, store: ProcessStore | None = None) -> Report:
    return await reclaim(
        store or process(world, "reclaimer"), world.identity, clock=TrioClock(), grace_s=grace_s
    )


async def says(world: World, step: int, name: str = "run") -> None:
    await group(world, name).add(Step(step), keep=1)


def kept_records(world: World, name: str = "run") -> int:
    return len(world.shared.select(group_prefix(world.identity.lake_id, name)))


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


async def trimmed_by_an_older_stepfs(world: World) -> None:
    """It keeps no record but the newest: what the group needed before is not known, so nothing goes."""
    await trio.sleep(2 * GRACE_S)
    await says(world, WRONG)
    (*older, _) = world.shared.select(group_prefix(world.identity.lake_id, "run"))
    for entry in older:
        world.shared.remove(entry.key)
    await trio.sleep(GRACE_S / 2)
    report = await clean(world)
    assert report.first_live_step == 0
    assert "not on record" in report.reason
    await trio.sleep(GRACE_S)
    assert (await clean(world)).first_live_step == WRONG


async def announced_and_then_taken_back(world: World) -> None:
    """The mistake comes between the two looks of a reclaimer that may advance otherwise."""
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


SCENARIOS: list[Callable[[World], Awaitable[None]]] = [
    a_wrong_checkpoint,
    retired_by_mistake,
    a_first_group_with_a_wrong_number,
    trimmed_by_an_older_stepfs,
    announced_and_then_taken_back,
]


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        await scenario(world)
        world.ledger.broken.clear()  # promises are not the subject here: groups come and go without telling the ledger

    small(main, on=grow)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_mistake_is_taken_back_within_grace(scenario: Callable[[World], Awaitable[None]]) -> None:
    run(scenario)


def grace_ignored(patch: pytest.MonkeyPatch) -> None:
    """Only the newest records count."""
    counting = group_records.counting
    patch.setattr(groups_room, "counting", lambda slots, _grace_s: counting(slots, 0.0))


def retiring_is_no_change(patch: pytest.MonkeyPatch) -> None:
    """A retired group stops to count at once."""
    least = plan_room._least

    def without(groups: tuple[GroupEvidence, ...], first_live: Step, *, grace_s: float) -> plan_room.Need:
        return least([g for g in groups if g.live], first_live, grace_s=grace_s)

    patch.setattr(plan_room, "_least", without)


def registering_is_no_change(patch: pytest.MonkeyPatch) -> None:
    """A group counts from its first second on as if it had always been there."""
    patch.setattr(GroupEvidence, "steady", GroupEvidence.live)


def unknown_counts_as_none(patch: pytest.MonkeyPatch) -> None:
    """A record that is not there needs nothing."""
    counting = group_records.counting

    def sure(slots: tuple[tuple[int, group_records.Entry], ...], grace_s: float) -> group_records.Counting:  # type: ignore[name-defined]
        found = counting(slots, grace_s)
        return group_records.Counting(found.earlier, began=found.began, unknown=False)

    patch.setattr(groups_room, "counting", sure)


def writers_trim_at_once(patch: pytest.MonkeyPatch) -> None:
    """The evidence is deleted by those who should keep it, and the reclaimer believes that there was none."""
    unknown_counts_as_none(patch)
    patch.setattr(Floor, "grace_s", 0.0)
    patch.setattr(
        group_sequence, "superseded", lambda slots, _grace_s: [entry.key for _, entry in slots[:-1]]
    )


MUTANTS = [
    (grace_ignored, a_wrong_checkpoint),
    (grace_ignored, retired_by_mistake),
    (grace_ignored, a_first_group_with_a_wrong_number),
    (retiring_is_no_change, retired_by_mistake),
    (registering_is_no_change, a_first_group_with_a_wrong_number),
    (unknown_counts_as_none, trimmed_by_an_older_stepfs),
    (writers_trim_at_once, a_wrong_checkpoint),
]


@pytest.mark.parametrize(("mutate", "scenario"), MUTANTS)
def test_mutant_of_the_grace_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[[World], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        run(scenario)


def test_records_within_grace_are_kept_and_trimmed_after_it() -> None:
    async def scenario(world: World) -> None:
        await clean(world, grace_s=GRACE_S)
        for step in range(NEED + 1, STEPS):
            await trio.sleep(GRACE_S / 4)
            await says(world, step)
            assert kept_records(world) <= 6
        assert kept_records(world) == 5
        await trio.sleep(2 * GRACE_S)
        await clean(world)
        assert kept_records(world) == 1, "also those of a group that says nothing more"

    small(scenario, on=grow)


def test_writers_learn_a_longer_grace_from_the_floor() -> None:
    """It is announced once, though nothing advances; until then what they trimmed holds everything."""

    async def scenario(world: World) -> None:
        await clean(world, grace_s=24 * GRACE_S)
        floor = Floor(process(world, "look"), world.identity)
        await floor.refresh()
        number = floor.number
        assert floor.grace_s == 24 * GRACE_S
        await clean(world, grace_s=24 * GRACE_S)
        await floor.refresh()
        assert floor.number == number, "said once"
        before = kept_records(world)
        for step in range(NEED + 1, STEPS):
            await trio.sleep(2 * GRACE_S)
            await says(world, step)
        assert kept_records(world) == before + STEPS - NEED - 1

    small(scenario, on=grow)


def test_a_reclaimer_with_a_shorter_grace_does_not_shorten_anothers() -> None:
    async def scenario(world: World) -> None:
        await says(world, WRONG)
        await trio.sleep(GRACE_S / 2)
        assert (await clean(world, grace_s=GRACE_S / 3)).first_live_step == WRONG
        await trio.sleep(GRACE_S / 3)
        assert (await clean(world)).first_live_step == WRONG, "what is gone is gone"
        await says(world, STEPS)
        await clean(world, grace_s=0.0)
        await group(world, "run").add(Step(STEPS), keep=2)
        assert (await clean(world)).first_live_step == STEPS

    small(scenario, on=grow)


def test_a_checkpoint_each_second_stays_cheap() -> None:
    """Some 300 records count at a time. A reclaimer that stays reads each of them once, and a writer none."""

    async def scenario(world: World) -> None:
        writer = process(world, "writer")
        store = process(world, "reclaimer")
        reclaimer = Reclaimer(store, world.identity, clock=TrioClock(), grace_s=300.0)
        await reclaimer.run()
        run_group = group(world, "run", writer)
        costs = []
        for second in range(1, 481):
            before = writer.counts.requests
            await run_group.replace(frozenset({Step(NEED + second % 3)}))
            costs.append(writer.counts.requests - before)
            if second % 60 == 0:
                before = store.counts.get
                await reclaimer.run()
                assert store.counts.get - before <= 60 + 10
            await trio.sleep(1.0)
        assert 270 <= kept_records(world) <= 303
        assert costs[-1] == costs[10] + 1, "a delete each time, once the first are old enough"

    small(scenario, on=grow)
