"""A reader that nobody promised anything asks for a step whose index has just been reclaimed."""

from __future__ import annotations

import pytest
from producer_world import World
from scenarios import scenario
from small_world import SEGMENT, checkpoint, grow, process, small
from test_reader_hazards import move_on

from stepfs.errors import CorruptError, ReclaimedError
from stepfs.format.ids import SegmentIndex, Step
from stepfs.format.keys import entries_key, segment_key
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim.run import Reclaimer


async def first_unloaded(world: World) -> tuple[LogReader, Step]:
    reader = await LogReader.open(process(world, "reader"), world.identity)
    live = range(reader.first_live_step, reader.state.sealed_steps)
    return reader, next(step for step in map(Step, live) if reader.entry_if_loaded(step) is None)


@scenario(small, on=grow)
async def test_it_is_told_that_the_step_was_reclaimed(world: World) -> None:
    """Seed 675949478: it was told that the lake is damaged and what to restore."""
    reader, step = await first_unloaded(world)
    await move_on(world)
    with pytest.raises(ReclaimedError, match="were reclaimed"):
        await reader.entry(step)
    await reader.poll()


@scenario(small, on=grow)
async def test_a_segment_that_is_missing_above_the_floor_is_damage(world: World) -> None:
    reader, step = await first_unloaded(world)
    world.shared.remove(segment_key(world.identity.lake_id, SegmentIndex(step // SEGMENT)))
    with pytest.raises(CorruptError, match="index segment is missing"):
        await reader.entry(step)


@scenario(small, on=grow)
async def test_step_records_that_a_slow_writer_leaves_after_their_segment_go_with_the_next_reclaim(
    world: World,
) -> None:
    """Torture found one: the writer was killed between the two creates and its successor finished after a reclaim."""
    reclaimer = Reclaimer(process(world, "reclaimer"), world.identity)
    await move_on(world)
    await reclaimer.run()
    late = entries_key(world.identity.lake_id, SegmentIndex(0))
    assert world.ledger.first_live_step >= SEGMENT
    await process(world, "slow writer").create(late, b"step records of a segment that is gone")
    further = world.ledger.first_live_step + 1
    assert further // SEGMENT == world.ledger.first_live_step // SEGMENT, "no segment goes"
    await checkpoint(world, "run", further)
    await reclaimer.run()
    assert world.ledger.first_live_step == further
    assert late not in world.shared.objects
