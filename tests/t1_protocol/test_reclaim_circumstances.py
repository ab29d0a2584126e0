"""A reclaimer whose clock is a day wrong, that may not delete, or whose lake was dropped and made again."""

from __future__ import annotations

import pytest
import trio
from cluster_world import SkewedClock
from doubles.trio_clock import TrioClock
from producer_world import World
from scenarios import scenario
from small_world import NEED, STEPS, audited, checkpoint, clean, group, grow, process, small

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.ids import Step
from stepfs.format.keys import LAKE
from stepfs.lake.groups import Group
from stepfs.lake.identity import create_lake
from stepfs.lake.reclaim.run import Reclaimer

DAY_S = 86_400.0
HOUR_S = 3600.0
LAST = STEPS - 1


@pytest.mark.parametrize("trainers_s", [-DAY_S, 0.0, DAY_S])
@pytest.mark.parametrize("reclaimers_s", [-DAY_S, DAY_S])
@scenario(small, on=grow)
async def test_grace_is_by_the_stores_clock_however_wrong_the_others_are(
    world: World, trainers_s, reclaimers_s
):
    clock = SkewedClock(reclaimers_s)
    reclaimer = Reclaimer(process(world, "patient"), world.identity, clock=clock, grace_s=HOUR_S)
    await trio.sleep(DAY_S)
    assert (await reclaimer.run()).first_live_step == NEED
    trainer = Group.of(process(world, "trainer"), world.identity, "run", SkewedClock(trainers_s))
    world.ledger.promises["run"] = LAST
    await trainer.add(Step(LAST), keep=1)
    await trio.sleep(HOUR_S - 60)
    assert (await reclaimer.run()).first_live_step == NEED
    await trio.sleep(120)
    assert (await reclaimer.run()).first_live_step == LAST


@scenario(small, on=grow)
async def test_what_one_that_may_not_delete_has_given_up_another_deletes(world: World) -> None:
    store = process(world, "no right")

    async def forbidden(keys: list[str]) -> None:
        raise RefusedError(f"cannot delete {keys[0]}")

    store.delete = forbidden  # type: ignore[method-assign,assignment]
    for _ in range(2):
        with pytest.raises(RefusedError, match="cannot delete"):
            await clean(world, store)
    assert world.ledger.first_live_step == NEED
    assert (await clean(world)).deleted_objects > 0
    await checkpoint(world, "run", LAST)
    await clean(world)
    await audited(world)


async def made_again(world: World) -> dict[str, bytes]:
    """Drop the lake and make another at its place. Returns the new one's objects."""
    world.shared.watch = None
    store = process(world, "operator")
    await store.delete([entry.key for entry in await store.list("")])
    new = await create_lake(store, slices=world.identity.grid, clock=TrioClock())
    await Group.of(store, new, "run", TrioClock()).add(Step(0))
    return {key: body for key, body in world.shared.objects.items() if key == LAKE or new.lake_id in key}


@scenario(small, on=grow)
async def test_who_knew_a_dropped_lake_does_nothing_to_the_one_that_was_made_in_its_place(world: World):
    """What is recorded for the old lake lies under the old lake's id, where nobody looks."""
    reclaimer = Reclaimer(process(world, "old"), world.identity, clock=TrioClock())
    await reclaimer.run()
    old = group(world, "run")
    await old.read()
    new = await made_again(world)
    await old.add(Step(LAST), keep=1)
    for orphans in (False, True):
        with pytest.raises(CorruptError, match="no readable snapshot"):
            await reclaimer.run(orphans=orphans)
    assert {key: world.shared.objects[key] for key in new} == new
    assert all(world.identity.lake_id in key for key in world.shared.objects.keys() - new.keys())
