"""`keep`: the newest *recorded* checkpoints stay, which after a roll-back are not the greatest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock

from stepfs.errors import UsageError
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake


async def group_of(*kept: int) -> Group:
    store = FaultyStore()
    group = Group.of(store, await create_lake(store, slices=1, clock=TrioClock()), "run", TrioClock())
    for step in kept:
        await group.add(Step(step))
    return group


async def kept(group: Group) -> list[int]:
    record = await group.read()
    assert record is not None
    return list(record.kept)


async def trains(group: Group, steps: Sequence[int], *, keep: int) -> list[list[int]]:
    seen = []
    for step in steps:
        await group.add(Step(step), keep=keep)
        seen.append(await kept(group))
        assert step in seen[-1], "what was just recorded is never lost"
    return seen


async def test_a_checkpoint_after_a_roll_back_is_kept_until_the_trainer_passes_the_greater_ones(autojump_clock):
    group = await group_of(90, 100)
    await group.add(Step(40))
    assert await kept(group) == [40, 90, 100]
    assert await trains(group, [50, 60, 90, 95, 105], keep=2) == [
        [40, 50, 90, 100], [50, 60, 90, 100], [60, 90, 100], [90, 95, 100], [95, 105],
    ]  # fmt: skip


async def test_a_trainer_that_resumes_from_an_older_checkpoint_keeps_that_and_not_the_branch_it_left(autojump_clock):
    """Three are kept; of {90, 100} the trainer resumed from 90: 100 is older news than 90, whatever its number."""
    group = await group_of(90, 100)
    record = await group.resumed(Step(90))
    assert (record.kept, record.order) == ((90, 100), (100, 90))
    assert await trains(group, [95, 105], keep=3) == [[90, 95, 100], [90, 95, 105]]


async def test_resuming_drops_nothing_and_brings_back_what_was_dropped(autojump_clock):
    group = await group_of(40, 50, 90, 100)
    record = await group.resumed(Step(50))
    assert record.order == (90, 100, 40, 50)
    record = await group.resumed(Step(45))
    assert record.order == (90, 100, 50, 40, 45)
    again = await group.resumed(Step(45))
    assert again == record, "saying it twice changes nothing"


async def test_without_keep_the_order_is_kept_too_and_dropping_does_not_disturb_it(autojump_clock):
    group = await group_of(10, 20, 15, 30)
    await group.drop(Step(20))
    record = await group.add(Step(40), keep=2)
    assert record.order == (30, 40)
    record = await (await group_of(10, 30, 20)).add(Step(25), keep=2)
    assert (record.kept, record.order) == ((20, 25, 30), (30, 20, 25))


async def test_the_order_of_recording_is_what_every_other_process_reads(autojump_clock):
    group = await group_of(100, 40)
    other = Group.of(group.control.store, group.control.identity, "run", TrioClock())
    record = await other.read()
    assert record == await group.read()
    assert (record.kept, record.recorded) == ((40, 100), (100, 40))
    record = await other.replace(frozenset({Step(40), Step(90), Step(100)}))
    assert record.order == (100, 40, 90), "what is new comes last"
    record = await (await group_of(40, 90, 100)).read()
    assert (record.recorded, record.order) == ((), (40, 90, 100)), "ascending goes without saying"


async def test_keep_zero_is_refused(autojump_clock):
    with pytest.raises(UsageError, match="keep at least one"):
        await (await group_of()).add(Step(1), keep=0)
