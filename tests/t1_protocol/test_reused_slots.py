"""Slots that were deleted and are taken again, met through a LIST: by a writer of a group, and by a cold start.

Two mistakes lived through every other test here: a group writer that believes whatever slot it could create, and a
reader that does not floor-check what a LIST showed it. Both need a sleeper and two writers that have moved on meanwhile.
"""

from __future__ import annotations

import pytest
from process_store import ProcessStore
from producer_world import World
from small_world import NEED, group, grow, inside_everywhere, process
from test_reader_hazards import move_on, reaches_the_end

from stepfs.consumers import Group
from stepfs.format.ids import Step
from stepfs.format.keys import snapshot_prefix
from stepfs.format.records import ConsumerRecord
from stepfs.format.snapshot import LogState, decode_snapshot
from stepfs.log.reader import LogReader

SLEEPER, OTHERS = NEED + 1, (NEED + 2, NEED + 3)


async def _adds_one(world: World, store: ProcessStore) -> None:
    record = await group(world, "run", store).add(Step(SLEEPER))
    assert SLEEPER in record.kept


async def _others_add_two(world: World) -> None:
    """Two records: the second trims the first, and the slot that a sleeper wanted is free again."""
    for step in OTHERS:
        await group(world, "run", process(world, "another node")).add(Step(step))


async def _all_are_kept(world: World) -> None:
    record = await group(world, "run").read()
    assert record is not None
    assert {SLEEPER, *OTHERS} <= set(record.kept), "what a writer was told is what everybody reads"


def test_a_group_record_in_a_slot_that_was_trimmed_is_not_taken_for_the_newest() -> None:
    assert inside_everywhere(grow, _adds_one, _others_add_two, _all_are_kept) >= 8


def any_free_slot(patch: pytest.MonkeyPatch) -> None:
    """A group writer whose create succeeded does not look whether its record is the greatest."""
    take = Group._take

    async def believe(group: Group, number: int, record: ConsumerRecord) -> bool | None:
        return True if await take(group, number, record) is not None else None

    patch.setattr(Group, "_take", believe)


def test_mutant_any_free_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    any_free_slot(monkeypatch)
    with pytest.raises(AssertionError, match="everybody reads"):
        inside_everywhere(grow, _adds_one, _others_add_two, _all_are_kept)


def _newest_snapshot(world: World) -> LogState:
    prefix = snapshot_prefix(world.identity.lake_id)
    key = max(key for key in world.shared.objects if key.startswith(prefix))
    return decode_snapshot(world.shared.objects[key], key)


async def _opens(world: World, store: ProcessStore) -> None:
    await reaches_the_end(world, await LogReader.open(store, world.identity))


async def _a_zombie_follows_the_snapshot(world: World) -> None:
    """All goes on and is reclaimed; then a sleeper takes the slot right after the snapshot a reader may have begun with."""
    await move_on(world, zombie_after=_newest_snapshot(world))


async def _nothing(world: World) -> None:
    del world


def test_hazard_01_a_cold_start_whose_list_shows_a_slot_taken_again() -> None:
    assert inside_everywhere(grow, _opens, _a_zombie_follows_the_snapshot, _nothing) >= 8


def lists_are_believed(patch: pytest.MonkeyPatch) -> None:
    """What a LIST showed is published without asking whether the floor has passed it."""
    read = LogReader._read_listed

    async def believe(reader: LogReader) -> None:
        lowest = reader._lowest_unconfirmed
        await read(reader)
        reader._lowest_unconfirmed = lowest

    patch.setattr(LogReader, "_read_listed", believe)


def test_mutant_lists_are_believed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lists_are_believed(monkeypatch)
    with pytest.raises(AssertionError, match="another history"):
        inside_everywhere(grow, _opens, _a_zombie_follows_the_snapshot, _nothing)
