"""What a reclaimer announced and never did stands in nobody's way (hazard 10, the reclaimer's side).

A closing record promises nothing once the slot after it is taken, so whoever needs a step below it takes that slot.
"""

from __future__ import annotations

import pytest
from doubles.trio_clock import TrioClock
from process_store import ProcessStore
from producer_world import World
from small_world import (
    NEED,
    STEPS,
    audited,
    checkpoint,
    clean,
    group,
    grow,
    inside_everywhere,
    killed_everywhere,
    process,
    register,
    small,
)

from stepfs.errors import WithdrawnError
from stepfs.format.ids import Step
from stepfs.lake.floor import Floor
from stepfs.lake.reclaim import run as run_room


async def announced(world: World) -> None:
    """A reclaimer closed at the group's need and was killed before it advanced."""
    await grow(world)
    floor = Floor(process(world, "killed"), world.identity)
    await run_room._append(floor, floor.successor(TrioClock(), closing=Step(NEED)))
    assert world.ledger.floor is not None
    assert (world.ledger.floor.first_live_step, world.ledger.floor.closing) == (0, NEED)


async def wants_everything(world: World, store: ProcessStore | None = None) -> None:
    """A new group needs what is announced and still there."""
    await checkpoint(world, "late", 3, store, keep=None)


def test_a_new_group_has_every_live_step_whatever_a_dead_reclaimer_announced() -> None:
    async def scenario(world: World) -> None:
        await wants_everything(world)
        await register(world, "mount")
        assert world.ledger.promises["mount"] == 0
        assert (await clean(world)).first_live_step == 0
        for name in ("late", "mount", "run"):
            await checkpoint(world, name, NEED)
        assert (await clean(world)).first_live_step == NEED
        await audited(world)

    small(scenario, on=announced)


def test_a_group_goes_back_to_what_a_dead_reclaimer_announced() -> None:
    async def scenario(world: World) -> None:
        await checkpoint(world, "run", 3, keep=None)
        record = await group(world, "run").read()
        assert record is not None
        assert record.kept == (3, NEED)
        assert (await clean(world)).first_live_step == 3

    small(scenario, on=announced)


def test_a_reclaimer_killed_at_any_await_refuses_only_what_is_gone() -> None:
    """The message is true: what it calls reclaimed lies below the first live step."""
    outcomes: set[str] = set()

    async def wanted(world: World) -> None:
        if world.ledger.first_live_step <= 3:
            await wants_everything(world)
            outcomes.add("kept")
            assert (await clean(world)).first_live_step == 3
            return
        with pytest.raises(WithdrawnError, match=f"those below {NEED} are reclaimed"):
            await wants_everything(world)
        outcomes.add("gone")

    killed_everywhere(grow, clean, wanted)
    assert outcomes == {"gone", "kept"}


def test_an_announcement_that_was_taken_back_never_lands() -> None:
    """The announcer lives and is only slow: inside every await of it a group takes its announcement back."""

    async def at_the_end(world: World) -> None:
        await clean(world)
        assert world.ledger.first_live_step in {3, NEED}
        for name in ("late", "run"):
            await checkpoint(world, name, STEPS - 1)
        await clean(world)
        await audited(world)

    async def clean_beside(world: World, store: ProcessStore) -> None:
        await clean(world, store)

    async def wants(world: World) -> None:
        try:
            await wants_everything(world)
        except WithdrawnError:
            assert world.ledger.first_live_step == NEED

    assert inside_everywhere(announced, clean_beside, wants, at_the_end) > 50


def test_the_next_reclaim_announces_no_more_than_it_takes() -> None:
    """A leftover above every need leaves with the next record."""

    async def scenario(world: World) -> None:
        await checkpoint(world, "run", 2, keep=None)
        floor = Floor(process(world, "killed"), world.identity)
        await floor.refresh()
        await run_room._append(floor, floor.successor(TrioClock(), closing=Step(NEED)))
        assert (await clean(world)).first_live_step == 2
        assert world.ledger.floor is not None
        assert world.ledger.floor.closing == 2

    small(scenario, on=grow)


def test_a_take_back_that_loses_its_slot_looks_again() -> None:
    """A reclaimer announces inside any await of the group's call; whichever record comes last, the step is safe."""

    async def announces(world: World) -> None:
        floor = Floor(process(world, "reclaimer"), world.identity)
        await floor.refresh()
        await run_room._append(floor, floor.successor(TrioClock(), closing=Step(NEED)))

    async def at_the_end(world: World) -> None:
        assert world.ledger.promises["late"] == 3
        assert (await clean(world)).first_live_step == 3

    assert inside_everywhere(announced, wants_everything, announces, at_the_end) > 5
