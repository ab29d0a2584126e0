"""What a plan keeps in a lake is nobody's orphan: reclaiming, verifying and forking leave it alone."""

from __future__ import annotations

from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from producer_world import World
from scenarios import scenario
from small_world import checkpoint, grow, litter, process, register, small

from stepfs.format.control import Cut
from stepfs.format.keys import plan_key, source_listing_key
from stepfs.lake.fork import fork
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim.run import reclaim
from stepfs.lake.verify.lake import verify_lake
from stepfs.lake.verify.metadata import verify_metadata
from stepfs.store.api import Put

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
    await fork(
        reader,
        child,
        Cut(reader.first_live_step, reader.first_live_step, reader.first_live_step),
        TrioClock(),
    )
    forked = (await open_lake(child)).lake_id
    for key, data in kept.items():
        assert await child.get(key.replace(identity.lake_id, forked)) == data, "a run goes on in the fork"
