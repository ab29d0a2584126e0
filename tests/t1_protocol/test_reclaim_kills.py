"""A reclaimer killed at every one of its awaits, and what the next one finds.

Exhaustive over one small lake: not a sample of moments but all of them.
"""

from __future__ import annotations

import pytest
from process_store import ProcessStore
from producer_world import World
from scenarios import scenario
from small_world import (
    NEED,
    STEPS,
    audited,
    checkpoint,
    clean,
    grow,
    inside_everywhere,
    killed_everywhere,
    litter,
    register,
    small,
)

from stepfs.errors import WithdrawnError


async def grown_and_littered(world: World) -> None:
    await grow(world)
    await litter(world)


async def cleaned(world: World) -> None:
    await clean(world)
    await audited(world)
    assert world.ledger.first_live_step == NEED


@scenario(small, on=grown_and_littered)
async def test_one_reclaim_leaves_exactly_what_is_needed(world: World) -> None:
    report = await clean(world)
    await audited(world)
    assert (report.first_live_step, report.floor) == (NEED, world.ledger.floor_version)
    assert report.floor > 0
    assert report.deleted_objects > NEED
    again = await clean(world)
    assert (again.deleted_objects, again.deleted_bytes) == (0, 0)


def test_a_reclaim_killed_at_any_await_is_finished_by_the_next() -> None:
    assert killed_everywhere(grown_and_littered, clean, cleaned) > 60


def test_a_group_may_come_back_after_a_reclaimer_was_killed() -> None:
    """It either has its steps for good or is told at once that it is too late; then reclaim goes on."""

    async def comes_back(world: World) -> None:
        try:
            await checkpoint(world, "run", 2, keep=None)
        except WithdrawnError:
            assert world.ledger.first_live_step > 2, "only what is gone is refused"
        await register(world, "late")
        await clean(world)
        await checkpoint(world, "late", STEPS)
        await checkpoint(world, "run", NEED)
        await cleaned(world)

    killed_everywhere(grown_and_littered, clean, comes_back)


def test_a_group_writer_killed_at_any_await_never_loses_steps() -> None:
    """What it may have left behind is a need that is honoured, or one that is reported; raising it goes on."""

    async def goes_back(world: World, store: ProcessStore) -> None:
        with pytest.raises(WithdrawnError):
            await checkpoint(world, "run", NEED - 1, store, keep=None)

    async def given_up(world: World) -> None:
        await grown_and_littered(world)
        await clean(world)

    async def raised(world: World) -> None:
        await checkpoint(world, "run", NEED + 1)
        await clean(world)
        await audited(world)
        assert world.ledger.first_live_step == NEED + 1

    killed_everywhere(given_up, goes_back, raised)


def test_another_reclaimer_at_any_await() -> None:
    """All of a second reclaim happens inside each await of the first."""
    assert inside_everywhere(grown_and_littered, clean, clean, cleaned) > 60


def test_a_reclaimer_that_is_further_at_any_await() -> None:
    """The trainer moves on and another reclaimer deletes beyond what the first has planned, even the log it reads."""

    async def further(world: World) -> None:
        await checkpoint(world, "run", STEPS - 1)
        await clean(world)

    async def at_the_end(world: World) -> None:
        await clean(world)
        await audited(world)
        assert world.ledger.first_live_step == STEPS - 1

    inside_everywhere(grown_and_littered, clean, further, at_the_end)
