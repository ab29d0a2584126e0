"""Reading log versions: one, or a stretch that is known to exist, several at once, delivered in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from stepfs.format.commit import Commit, decode_commit
from stepfs.format.ids import Version
from stepfs.format.keys import log_prefix, numbered
from stepfs.lake.several import in_order
from stepfs.lake.slots import listed_slots
from stepfs.store.api import Store


async def list_versions(store: Store, lake_id: str, first: Version) -> tuple[list[Version], Version | None]:
    """The versions from `first` up to the first gap, as LIST shows them; and the first version behind a gap, if any.

    A gap may come from a LIST that lags, from a reclaim that is still deleting, or from a lost object.
    """
    versions: list[Version] = []
    for number in await listed_slots(store, log_prefix(lake_id), after=first - 1):
        if number != first + len(versions):
            return versions, Version(number)
        versions.append(Version(number))
    return versions, None


async def read_commit(store: Store, lake_id: str, version: Version) -> tuple[Commit, bytes] | None:
    """A commit and its stored bytes; None if there is none, or none any more."""
    key = numbered(log_prefix(lake_id), version)
    body = await store.get(key)
    return None if body is None else (decode_commit(body, key), body)


async def read_versions(
    store: Store, lake_id: str, versions: Sequence[Version]
) -> AsyncGenerator[tuple[str, bytes], None]:
    """(key, body) of each version in order; stops early at one that has been deleted since it was listed."""
    prefix = log_prefix(lake_id)
    keys = (numbered(prefix, version) for version in versions)
    async with aclosing(in_order(keys, store.get)) as bodies:
        async for key, body in bodies:
            if body is None:
                return
            yield key, body
