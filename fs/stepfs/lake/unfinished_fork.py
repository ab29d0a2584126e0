"""Killed forks: found by their marker, undone by the next fork of the same lake to the same URL.

A fork writes a marker at the new lake's place before anything else, even before the parent's group. Without a clock it
cannot be known whether the fork behind a marker still runs. It need not be known: creating the one `lake.msgpack`
finishes a fork. Once another lake holds that slot, the fork can never be finished, and its group in the parent and its
objects may be deleted. Rejected: an id derived from parent and URL. A fork that is dropped and made again must be
another lake (hazard 7).
"""

from __future__ import annotations

import logging
from typing import Final

from stepfs.clock import Clock
from stepfs.errors import AbsentError, CorruptError, NewerFormatError
from stepfs.format.fork_marker import FORKING, ForkMarker, decode_marker, encode_marker, marker_key
from stepfs.format.records import LakeIdentity
from stepfs.lake.groups import Group
from stepfs.lake.sequence import create_own
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.lake.fork")

_MARKERS_MAX: Final = 1000


def group_name(child_lake_id: str) -> str:
    """The group by which a fork keeps its parent's data."""
    return f"fork:{child_lake_id}"


async def mark(store: Store, marker: ForkMarker) -> None:
    """Write the marker of a fork that begins at this place."""
    body = encode_marker(marker)
    await create_own(store, marker_key(marker.lake_id), body, "fork again, to the same or another URL")


async def markers(store: Store) -> list[ForkMarker]:
    """The forks that began here and are not known to be finished. Unreadable markers are skipped."""
    found = []
    for entry in await store.list(FORKING, limit=_MARKERS_MAX):
        data = await store.get(entry.key)
        try:
            if data is not None:
                found.append(decode_marker(data, entry.key))
        except (CorruptError, NewerFormatError) as error:
            _log.warning("a fork that began here cannot be undone: %s", error)
    return found


async def undo_others(
    store: Store, winner: str, parent_store: Store, parent: LakeIdentity, clock: Clock
) -> None:
    """Undo every fork of `parent` that began here and is not `winner`, whose id `lake.msgpack` holds."""
    for marker in await markers(store):
        if marker.parent_id == parent.lake_id and marker.lake_id != winner:
            await undo(store, marker, parent_store, parent, clock)


async def undo(
    store: Store, marker: ForkMarker, parent_store: Store, parent: LakeIdentity, clock: Clock
) -> None:
    """Retire the group in the parent, then delete the fork's objects; the marker last, so that it survives a kill."""
    group = Group.of(parent_store, parent, group_name(marker.lake_id), clock)
    try:
        record = await group.read()
        if record is not None and not record.retired:
            await group.retire()
    except AbsentError:
        pass
    await store.delete([entry.key for entry in await store.list(f"{marker.lake_id}/")])
    await unmark(store, marker.lake_id)


async def unmark(store: Store, lake_id: str) -> None:
    """Remove the marker: the fork has become a lake, or is fully undone."""
    await store.delete([marker_key(lake_id)])
