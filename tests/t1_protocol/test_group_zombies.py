"""A slow writer of a group takes a slot that was trimmed long ago: nobody believes its record, nor restores its past.

Two seeds of the simulator (5012050, 5013448) met it: a writer that found "its" change on record in such a slot, and
one that undid its late change by restoring a set that others had replaced meanwhile. A reclaimer that lists a slot and
reads it a moment later met it in no seed: its turn takes two others, in the right order, within three requests.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import trio
from process_store import ProcessStore
from producer_world import World
from small_world import NEED, checkpoint, clean, group, grow, inside_everywhere, process, small

from stepfs.errors import WithdrawnError
from stepfs.format.ids import Step
from stepfs.format.keys import group_prefix, number_of, numbered
from stepfs.format.records import RECORD_ID_BYTES, ConsumerRecord, decode_consumer, encode_consumer
from stepfs.lake import retention

LATE, NEWER = Step(NEED + 1), (Step(NEED + 2), Step(NEED + 3), Step(NEED + 4))


def _newest(world: World) -> tuple[int, ConsumerRecord]:
    prefix = group_prefix(world.identity.lake_id, "run")
    key = max(key for key in world.shared.objects if key.startswith(prefix))
    number = number_of(prefix, key)
    assert number is not None
    return number, decode_consumer(world.shared.objects[key], key)[1]


async def _others_go_on(world: World, *, keep: int | None = None) -> None:
    """Hours apart, so that each trims what the one before has replaced."""
    for step in NEWER:
        await trio.sleep(2 * 3600)
        await checkpoint(world, "run", step, keep=keep)


async def _others_go_on_and_a_zombie_wakes(world: World) -> None:
    """It wanted to record `LATE` as well, in the slot that was the newest; then it dies."""
    number, newest = _newest(world)
    await _others_go_on(world)
    if LATE in newest.kept:
        return
    record = retention.with_order(newest, (*newest.order, LATE))
    key = numbered(group_prefix(world.identity.lake_id, "run"), number)
    with suppress(Exception):  # the slot is trimmed, or not
        await process(world, "zombie").create(
            key, encode_consumer(world.identity.lake_id, replace(record, record_id=b"z" * RECORD_ID_BYTES))
        )


async def _records_late(world: World, store: ProcessStore) -> None:
    """As a node does that watches the checkpoint directory."""
    watching = group(world, "run", store)
    record = await watching.revise(lambda kept: kept | {LATE}, brings=frozenset({LATE}))
    assert LATE in record.kept


async def _late_is_kept(world: World) -> None:
    record = await group(world, "run").read()
    assert record is not None
    assert {LATE, *NEWER} <= set(record.kept), "what a writer was told is what everybody reads"


def test_a_change_that_is_found_in_a_slot_taken_again_is_not_on_record() -> None:
    assert inside_everywhere(grow, _records_late, _others_go_on_and_a_zombie_wakes, _late_is_kept) >= 6


def test_a_change_that_comes_too_late_restores_what_it_replaced_and_not_what_was_long_before() -> None:
    """The others replace the set, and later a reclaim passes the sleeper's step while its record is on its way."""
    withdrawn = 0

    async def scenario(world: World, others_at: int, reclaim_at: int) -> bool:
        store = process(world, "sleeper")

        async def others() -> None:
            await _others_go_on(world, keep=1)

        async def reclaimed() -> None:
            await clean(world)

        store.inside[others_at], store.inside[reclaim_at] = others, reclaimed
        late = False
        try:
            await _records_late(world, store)
        except WithdrawnError:
            late = True
        _, newest = _newest(world)
        assert {NEWER[-1]} <= set(newest.kept) <= {LATE, NEWER[-1]}, (
            f"{others_at}, {reclaim_at}: {newest.kept}"
        )
        return late

    for others_at in range(1, 7):
        for reclaim_at in range(others_at + 1, others_at + 9):
            withdrawn += small(
                lambda world, at=(others_at, reclaim_at): scenario(world, *at),  # type: ignore[misc]
                on=grow,
            )
    assert withdrawn >= 3


EARLIER = Step(NEED - 4)


async def _goes_back(world: World) -> None:
    """A checkpoint below the one that the reclaimer has just read is recorded, unless that is announced already."""
    with suppress(WithdrawnError):
        await checkpoint(world, "run", EARLIER, keep=None)


async def _the_record_moves_on_and_a_zombie_takes_its_slot(world: World) -> None:
    """The next record keeps what the one before kept; the zombie, which knew neither, kept less."""
    number, newest = _newest(world)
    await checkpoint(world, "run", NEWER[0], keep=None)
    record = retention.with_order(newest, (NEWER[0],))
    key = numbered(group_prefix(world.identity.lake_id, "run"), number)
    with suppress(Exception):  # the slot is trimmed, or not
        await process(world, "zombie").create(
            key, encode_consumer(world.identity.lake_id, replace(record, record_id=b"z" * RECORD_ID_BYTES))
        )


def test_hazard_10_a_reclaimer_believes_no_record_that_took_the_slot_between_its_list_and_its_get() -> None:
    kept_back = 0

    async def scenario(world: World, back_at: int, zombie_at: int) -> bool:
        store = process(world, "reclaimer")

        async def back() -> None:
            await _goes_back(world)

        async def zombie() -> None:
            await _the_record_moves_on_and_a_zombie_takes_its_slot(world)

        store.inside[back_at], store.inside[zombie_at] = back, zombie
        await clean(world, store)
        assert not world.ledger.broken, (back_at, zombie_at, world.ledger.broken)
        return not store.inside and world.ledger.first_live_step == EARLIER

    for back_at in range(1, 30):
        for zombie_at in range(back_at + 1, back_at + 12):
            kept_back += small(
                lambda world, at=(back_at, zombie_at): scenario(world, *at),  # type: ignore[misc]
                on=grow,
            )
    assert kept_back > 50
