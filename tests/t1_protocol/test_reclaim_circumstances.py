"""Reclaim in unusual circumstances: wrong clocks, missing rights, a lake made again, readers without a promise,
objects of plans.
"""

from __future__ import annotations

import pytest
import trio
from cluster_world import SkewedClock
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from producer_world import World
from scenarios import scenario
from small_world import NEED, SEGMENT, STEPS, audited, checkpoint, clean, group, grow, litter, process, register, small
from test_reader_hazards import move_on

from stepfs.errors import CorruptError, ReclaimedError, RefusedError
from stepfs.format.ids import SegmentIndex, Step
from stepfs.format.keys import LAKE, extent, index_prefix, plan_key, source_listing_key
from stepfs.lake.control import Group
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim.run import Reclaimer
from stepfs.lake.verify.lake import verify_lake
from stepfs.lake.verify.metadata import verify_metadata
from stepfs.store.api import Put

DAY_S = 86_400.0
HOUR_S = 3600.0
LAST = STEPS - 1


@pytest.mark.parametrize("trainers_s", [-DAY_S, 0.0, DAY_S])
@pytest.mark.parametrize("reclaimers_s", [-DAY_S, DAY_S])
@scenario(small, on=grow)
async def test_grace_is_by_the_stores_clock_however_wrong_the_others_are(world: World, trainers_s, reclaimers_s):
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
    world.shared.remove(extent(index_prefix(world.identity.lake_id), SegmentIndex(step // SEGMENT)))
    with pytest.raises(CorruptError, match="index segment is missing"):
        await reader.entry(step)


DIGEST = "0123456789abcdef" * 2


@scenario(small, on=grow)
async def test_listings_and_plans_survive_a_reclaim_and_are_no_damage(world: World) -> None:
    await litter(world)
    store, identity = process(world, "keeper"), world.identity
    kept = {
        source_listing_key(identity.lake_id, DIGEST, 0): b"files",
        source_listing_key(identity.lake_id, DIGEST, 1): b"more",
        plan_key(identity.lake_id, DIGEST): b"version: 1",
    }
    for key, data in kept.items():
        assert await store.create(key, data) is Put.CREATED
    await register(world, "other")
    await checkpoint(world, "other", 12)
    for _ in range(2):
        await reclaim(store, identity, clock=TrioClock(), orphans=True)
    for key, data in kept.items():
        assert await store.get(key) == data
    reader = await LogReader.open(store, identity)
    assert not (await verify_lake(reader, origins=OriginStores(store, lambda _: store))).errors
    assert not await verify_metadata(store, identity)
    child = FaultyStore(ObjectMap(), actor="child")
    await fork(reader, child, Cut(reader.first_live_step, reader.first_live_step, reader.first_live_step), TrioClock())
    forked = (await open_lake(child)).lake_id
    for key, data in kept.items():
        assert await child.get(key.replace(identity.lake_id, forked)) == data, "a run goes on in the fork"
