"""Forks that were killed: found by their marker, undone by the next fork of the same lake to the same URL.

A marker goes into the new lake's place before anything else is written, the parent's group included. Whether the fork
behind a marker still runs cannot be told without a clock. It need not be: a fork is finished by creating the one
`lake.msgpack`, so once that slot is taken by another lake, it never can be, and its group in the parent and its
objects may go. Rejected: an id derived from parent and URL. A fork that is dropped and made again must be another
lake (hazard 7).
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
    """The group by which a fork holds on to its parent's data."""
    return f"fork:{child_lake_id}"


async def mark(store: Store, marker: ForkMarker) -> None:
    """Say in the new lake's place that this fork has begun."""
    body = encode_marker(marker)
    await create_own(store, marker_key(marker.lake_id), body, "fork again, to the same or another URL")


async def markers(store: Store) -> list[ForkMarker]:
    """The forks that began here and are not known to be over. What cannot be read is passed over."""
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
    """Let go of the parent, then remove what was written; the marker last, so that a kill leaves it to be found."""
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
    """The fork is a lake, or nothing of it is left."""
    await store.delete([marker_key(lake_id)])
