"""Log slots that were deleted and are taken again, met through a LIST by a cold start, or by a writer after a reopen.

One mistake lived through every other test here: a reader or writer that floor-checks only what it probed. It needs a
sleeper whom others have left behind.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from doubles.trio_clock import TrioClock
from process_store import ProcessStore
from producer_world import World, feed
from small_world import checkpoint, clean, grow, inside_everywhere, process, small
from test_reader_hazards import move_on, reaches_the_end

from stepfs.errors import SealedError, StoreUnreachableError
from stepfs.format.ids import Version
from stepfs.format.keys import log_prefix, numbered, snapshot_prefix
from stepfs.format.snapshot import LogState, decode_snapshot
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader


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


def only_probes_are_checked(patch: pytest.MonkeyPatch) -> None:
    """A slot that was not probed (a LIST showed it, or it was taken after a reopen) needs no look at the floor."""
    confirm, read = LogReader.confirm, LogReader._read_listed

    async def untouched(reader: LogReader) -> Version | None:
        lowest = reader._lowest_unconfirmed
        behind = await read(reader)
        reader._lowest_unconfirmed = lowest
        return behind

    patch.setattr(LogReader, "_read_listed", untouched)

    async def believe(reader: LogReader) -> bool:
        if reader._lowest_unconfirmed is not None:
            return await confirm(reader)
        await reader.control.refresh()
        reader.state, reader.first_live_step = reader.head, reader.control.first_live_step
        return True

    patch.setattr(LogReader, "confirm", believe)


async def _seals_after_a_reopen(world: World, store: ProcessStore) -> None:
    """What it follows is a zombie's slot, so it starts again from a snapshot, and takes the next slot unprobed."""
    reader = await LogReader.open(process(world, "before"), world.identity)
    await move_on(world, zombie_after=reader.head, chained=False)
    reader.store = store
    with suppress(SealedError):
        await seal(reader, TrioClock())
        assert world.ledger.state.sealed, "who was told that the lake is sealed finds it sealed"


async def _all_goes_on(world: World) -> None:
    """Until every slot that a writer may be about to take is filled, and deleted again."""
    if world.ledger.state.sealed:
        return
    for until in (18, 20, 22):
        async with world.producer("a") as producer:
            await feed(producer, until)
    await checkpoint(world, "run", len(world.ledger.steps))
    await clean(world)


def test_hazard_01_a_slot_taken_right_after_a_reopen_is_floor_checked() -> None:
    """A writer's own slot, never probed: the simulator lost a record so (a producer that followed a zombie's commit)."""
    assert inside_everywhere(grow, _seals_after_a_reopen, _all_goes_on, _nothing) >= 8


def test_mutant_only_probes_are_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    only_probes_are_checked(monkeypatch)
    with pytest.raises(AssertionError, match="another history"):
        inside_everywhere(grow, _opens, _a_zombie_follows_the_snapshot, _nothing)
    with pytest.raises(AssertionError, match="finds it sealed"):
        inside_everywhere(grow, _seals_after_a_reopen, _all_goes_on, _nothing)


def test_a_misled_writer_starts_again_though_the_slot_that_misled_it_is_gone() -> None:
    """Its reopen fails once; meanwhile the slot is deleted, and looks like the free slot behind its stale head."""

    async def scenario(world: World) -> None:
        reader = await LogReader.open(process(world, "writer"), world.identity)
        await move_on(world, zombie_after=reader.head, chained=False)
        reopen, failures = reader.reopen, [StoreUnreachableError("503")]

        async def fails_once() -> None:
            if failures:
                raise failures.pop()
            await reopen()

        reader.reopen = fails_once  # type: ignore[method-assign]
        with pytest.raises(StoreUnreachableError):
            await reader.refresh()
        world.shared.remove(numbered(log_prefix(world.identity.lake_id), Version(reader.head.version + 1)))
        await reader.refresh()
        assert reader.head.version == world.ledger.state.version

    small(scenario, on=grow)
