"""The objects of a planned producer in its lake beside steps, as readers find it: plan texts, listings, positions.

The names of texts and listings are their digests. Positions are in commits, one behind the last step of each.
"""

from __future__ import annotations

from stepfs.format.commit import Commit
from stepfs.format.ids import Version
from stepfs.format.keys import plan_key, source_listing_key
from stepfs.format.planned import Listing, from_shards, shard_count
from stepfs.lake.log.apply import read_commit
from stepfs.store.api import Store


async def kept_plan(store: Store, lake_id: str, digest: str) -> str | None:
    data = await store.get(plan_key(lake_id, digest))
    return None if data is None else data.decode("utf-8", "replace")


async def kept_listing(store: Store, lake_id: str, digest: str) -> Listing | None:
    """A kept listing, without locations; None if it is not (wholly) there."""
    shards: list[bytes] = []
    while not shards or len(shards) < shard_count(shards[0]):
        shard = await store.get(source_listing_key(lake_id, digest, len(shards)))
        if shard is None:
            return None
        shards.append(shard)
    return from_shards(shards, digest)


async def commit_of(store: Store, lake_id: str, version: Version) -> Commit | None:
    """The commit of a log version; None once it was reclaimed."""
    found = await read_commit(store, lake_id, version)
    return None if found is None else found[0]
