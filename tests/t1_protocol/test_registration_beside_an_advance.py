"""Hazard 10: a reclaimer goes over its announcement while a registration reads. Found by the model (groups.pml, mutant 9).

The reclaimer has listed the groups a second time. A registration reads the floor, a dead writer's record lands, the
reclaimer advances, and only then the registration reads that record: it is older than the advance that did not see it.
"""

from __future__ import annotations

from functools import partial

import pytest
import trio
from producer_world import World
from small_world import NEED, audited, clean, group, grow, process, small
from test_late_group_records import lands

from stepfs.format.ids import Step

READS = range(
    5, 7
)  # awaits of a registration, two a request: after its look at the floor, before it reads the record


async def _beside(reads: int, at: int, needs: set[int], world: World) -> bool:
    """`reads` requests of a registration before the `at`th request of a reclaim, the others after the reclaim."""
    reclaimer, writer = process(world, "reclaimer"), process(world, "writer")
    has_read, reclaimed = trio.Event(), trio.Event()
    record = group(world, "late")._records.joined(None, Step(0))

    async def waits() -> None:
        has_read.set()
        await reclaimed.wait()

    async def registers() -> None:
        found = await group(world, "late", writer).register()
        world.ledger.promise("late", found.need)
        assert found.need >= world.ledger.first_live_step
        needs.add(found.need)
        has_read.set()

    async with trio.open_nursery() as nursery:

        async def meanwhile() -> None:
            nursery.start_soon(registers)
            await has_read.wait()
            await lands(world, "late", record)

        writer.inside[reads + 1] = waits
        reclaimer.inside[at] = meanwhile
        await clean(world, reclaimer)
        reclaimed.set()
    if reclaimer.inside:
        return False
    await audited(world)
    assert not world.ledger.broken
    return True


@pytest.mark.parametrize("reads", READS)
def test_hazard_10_a_registration_believes_no_record_that_the_reclaimer_has_gone_past(reads: int) -> None:
    needs: set[int] = set()
    at = 1
    while small(partial(_beside, reads, at, needs), on=grow, seed=at):
        at += 1
    assert at > 20
    assert needs == {0, NEED}, "both sides of the race were seen"
