"""Hazard 10: a group's record lands late, after a reclaim, and its writer is dead: nobody has looked at the floor for it.

A record is believed only after the floor check, whoever wrote it. The scenarios here stop at the moment where such a
record is in the store; what follows is up to the group's next writer, or to the next reclaim.
"""

from __future__ import annotations

from functools import partial

import pytest
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
    process,
    small,
)

from stepfs.errors import WithdrawnError
from stepfs.format.ids import Step
from stepfs.format.keys import group_prefix, numbered
from stepfs.format.records import ConsumerRecord, encode_consumer


async def lands(world: World, name: str, record: ConsumerRecord, store: ProcessStore | None = None) -> None:
    """The request of a writer that has died arrives only now, in the slot that was free when it was sent."""
    number, _ = await group(world, name).newest()
    slot = numbered(group_prefix(world.identity.lake_id, name), number + 1)
    await (store or process(world, "wire")).create(slot, encode_consumer(world.identity.lake_id, record))


async def a_first_record_lands_after_a_reclaim(world: World) -> None:
    """The group "late" was to be registered before anything was reclaimed; its record needs step 0."""
    record = group(world, "late")._records.joined(None, Step(0))
    await clean(world)
    assert world.ledger.first_live_step == NEED
    await lands(world, "late", record)


async def a_checkpoint_lands_after_a_reclaim(world: World) -> None:
    """The group "run" went back to step 3 beside the checkpoint that it kept; step 3 has gone meanwhile."""
    run = group(world, "run")
    newest = await run.read()
    assert newest is not None
    record = run._records._next(newest, kept=(Step(3), *newest.kept))
    await clean(world)
    assert world.ledger.first_live_step == NEED
    await lands(world, "run", record)


async def goes_on(world: World) -> None:
    """Reclaim is not stopped: every group moves to the end, and what is left is what is needed."""
    await clean(world)
    for name in list(world.ledger.promises):
        await checkpoint(world, name, STEPS - 1)
    assert (await clean(world)).first_live_step == STEPS - 1
    await audited(world)


def test_a_group_is_never_promised_steps_that_are_reclaimed_by_a_record_that_it_finds() -> None:
    async def scenario(world: World) -> None:
        await a_first_record_lands_after_a_reclaim(world)
        record = await group(world, "late").register()
        world.ledger.promise("late", record.need)
        assert (record.need, record.kept) == (NEED, ())
        assert await group(world, "late").read() == record, "the store says what was promised"
        await goes_on(world)

    small(scenario, on=grow)


@pytest.mark.logs("group 'run': the checkpoints at .3. are left out: steps below 9 were reclaimed")
@pytest.mark.parametrize("call", ["register", "add", "drop", "revise"])
def test_a_checkpoint_on_record_whose_steps_are_gone_is_left_out_by_whoever_writes_next(call: str) -> None:
    async def scenario(world: World) -> None:
        await a_checkpoint_lands_after_a_reclaim(world)
        run = group(world, "run")
        if call == "register":
            record = await run.register()
        elif call == "add":
            record = await run.add(Step(NEED + 1))
        elif call == "drop":
            await run.add(Step(NEED + 1))
            record = await run.drop(Step(NEED + 1))
        else:
            record = await run.revise(
                lambda kept: kept | {Step(NEED + 1)}, brings=frozenset({Step(NEED + 1)})
            )
        assert record.need == NEED
        assert 3 not in record.kept
        await goes_on(world)

    small(scenario, on=grow)


async def _registers_late(needs: set[int], world: World, store: ProcessStore | None = None) -> None:
    """The record lands just now; the incarnation that registers finds it and believes what it is told."""
    await lands(world, "late", group(world, "late")._records.joined(None, Step(0)), store)
    record = await group(world, "late", store).register()
    world.ledger.promise("late", record.need)
    needs.add(record.need)


def test_hazard_10_a_late_first_record_is_found_inside_every_await_of_a_reclaim() -> None:
    needs: set[int] = set()

    async def reclaims(world: World, store: ProcessStore) -> None:
        await clean(world, store)

    assert inside_everywhere(grow, reclaims, partial(_registers_late, needs), goes_on) > 50
    assert needs == {0, NEED}, "both sides of the race were seen"


def test_hazard_10_a_reclaim_inside_every_await_of_a_registration_that_finds_a_late_record() -> None:
    needs: set[int] = set()

    async def registers(world: World, store: ProcessStore) -> None:
        await _registers_late(needs, world, store)

    assert inside_everywhere(grow, registers, clean, goes_on) >= 3
    assert needs == {0, NEED}


def test_a_checkpoint_that_is_found_on_record_is_acknowledged_only_if_its_steps_are_there() -> None:
    async def scenario(world: World) -> None:
        await a_checkpoint_lands_after_a_reclaim(world)
        run = group(world, "run")
        with pytest.raises(WithdrawnError) as caught:
            await run.revise(lambda kept: kept | {Step(3)}, brings=frozenset({Step(3)}))
        assert caught.value.late == {3}
        record = await run.read()
        assert record is not None
        assert record.kept == (NEED,)
        await goes_on(world)

    small(scenario, on=grow)
