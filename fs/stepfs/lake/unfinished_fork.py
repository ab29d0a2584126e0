"""Forks by their group in the parent. A killed one is found by it, and undone by the next fork of that lake to the same URL.

The group `fork:<id>` is registered with the place and the cut of the fork before anything is written there. Without a
clock it cannot be known whether that fork still runs. It need not be known: creating the one `lake.msgpack` finishes a
fork. Once another lake holds that slot, the fork can never be finished. Undoing retires the group *first*: a slow forker
looks at it before it creates the identity, finds it gone, and removes the objects it wrote meanwhile. Rejected: an id derived
from parent and URL. A fork that is dropped and made again must be another lake (hazard 7).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from stepfs.clock import Clock
from stepfs.errors import AbsentError
from stepfs.lake.control import Control
from stepfs.lake.groups import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.store.api import Store

_FORK: Final = "fork:"


def group_name(child_lake_id: str) -> str:
    """The group by which a fork keeps its parent's data."""
    return f"{_FORK}{child_lake_id}"


async def group_in_parent(reader: LogReader, origins: OriginStores, clock: Clock | None = None) -> Group | None:
    """The group of a fork in its parent; None if this lake is no fork, or if the parent was deleted as a whole: then
    `stepfs verify` reports the lost steps.

    Only in the nearest origin: that lake itself holds the data that it shares with its own parent, as long as we hold it.
    """
    for parent in reader.state.origins[:1]:
        with suppress(AbsentError):
            store = origins.open(parent)
            identity = await open_lake(store)
            if identity.lake_id == parent.lake_id:
                return Group.of(store, identity, group_name(reader.identity.lake_id), clock)
    return None


async def undo_others(store: Store, winner: str, parent: Control) -> None:
    """Undo every fork of `parent` that began here and is not `winner`, whose id `lake.msgpack` holds."""
    await parent.refresh()
    for name, group in parent.groups.items():
        if group.fork is not None and group.fork.url == store.url and name != group_name(winner):
            await undo(store, name.removeprefix(_FORK), parent)


async def undo(store: Store, lake_id: str, parent: Control) -> None:
    """Retire the group in the parent, then delete the fork's objects."""
    group = Group.on(parent, group_name(lake_id))
    with suppress(AbsentError):
        await group.retire()
    await store.delete([entry.key for entry in await store.list(f"{lake_id}/")])
