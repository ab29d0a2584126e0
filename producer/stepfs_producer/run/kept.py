"""What a run keeps in its lake besides steps: the text of each plan, and the frozen listing of each source.

Both are named by their digests and created if absent, so two runs that keep the same write the same bytes.
"""

from __future__ import annotations

from stepfs.errors import CorruptError
from stepfs.format.keys import plan_key, source_listing_key
from stepfs.lake.sequence import Mine, settled, take_slot
from stepfs.store.api import Store
from stepfs_producer.sources.corpus import Listing, from_shards, shard_count


async def keep_plan(store: Store, lake_id: str, digest: str, text: str) -> None:
    """Keep the normalised text of a plan."""
    await _keep(store, plan_key(lake_id, digest), text.encode())


async def kept_plan(store: Store, lake_id: str, digest: str) -> str | None:
    """The normalised text of a plan that an earlier run kept."""
    data = await store.get(plan_key(lake_id, digest))
    return None if data is None else data.decode("utf-8", "replace")


async def keep_listing(store: Store, lake_id: str, listing: Listing) -> None:
    """Keep a listing. A run that names it in a position has kept all of it before."""
    for number, shard in enumerate(listing.to_shards()):
        await _keep(store, source_listing_key(lake_id, listing.digest, number), shard)


async def kept_listing(store: Store, lake_id: str, digest: str) -> Listing | None:
    """A kept listing, without locations; None if it is not (wholly) there, as in a fork."""
    shards: list[bytes] = []
    while not shards or len(shards) < shard_count(shards[0]):
        shard = await store.get(source_listing_key(lake_id, digest, len(shards)))
        if shard is None:
            return None
        shards.append(shard)
    return from_shards(shards, digest)


async def _keep(store: Store, key: str, body: bytes) -> None:
    if not isinstance(settled(await take_slot(store, key, body), store, "start again"), Mine):
        raise CorruptError(f"{store.url}: {key} holds other bytes than its name says; restore or remove it")
