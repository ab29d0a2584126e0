"""The fleet view: one small object per mount with a group, rewritten now and then, removed at unmount.

The records are informative only. A mount that cannot write its record goes on. A killed mount leaves its record behind
until the next mount at the same place takes it over. The next reclaim removes the records of groups that are gone.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

import trio

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.keys import node_key, nodes_prefix
from stepfs.format.node import NodeRecord, decode_node, encode_node, node_name
from stepfs.format.records import LakeIdentity
from stepfs.store.api import Entry, Store

BEAT_S: Final = 15.0  # from one record of a mount to the next, unless there are many mounts
BEAT_SPREAD: Final = 0.75  # a large fleet lengthens each interval by a random share, up to this
FRESH_INTERVALS: Final = 3  # after so many: the mount was killed, or its store is away, or a clock is wrong
_BEAT_S_PER_NODE: Final = 1 / 20
_RECORD_BYTES_MAX: Final = 1 << 16
_READS_MAX: Final = 16


async def write_node(store: Store, identity: LakeIdentity, record: NodeRecord) -> None:
    await store.put(_key(identity, record), [encode_node(identity.lake_id, record)])


async def remove_node(store: Store, identity: LakeIdentity, record: NodeRecord) -> None:
    await store.delete([_key(identity, record)])


async def list_nodes(store: Store, identity: LakeIdentity) -> list[NodeRecord]:
    """The latest record of each mount, by group and place. Unreadable records are left out."""
    listed = await store.list(nodes_prefix(identity.lake_id))
    found: list[NodeRecord] = []
    limiter = trio.CapacityLimiter(_READS_MAX)

    async def read(entry: Entry) -> None:
        async with limiter:
            try:
                data = await store.get(entry.key, bytes_max=_RECORD_BYTES_MAX)
                lake_id, record = decode_node(data or b"", entry.key)
            except (CorruptError, NewerFormatError):
                return  # or removed since it was listed
            if lake_id == identity.lake_id:
                found.append(record)

    async with trio.open_nursery() as nursery:
        for entry in listed:
            nursery.start_soon(read, entry)
    return sorted(found, key=lambda record: (record.group, record.host, record.directory))


def usual_beat_s(nodes: int) -> float:
    """Seconds between two records of a mount in a fleet of `nodes` mounts, without the random part."""
    return max(BEAT_S, nodes * _BEAT_S_PER_NODE)


async def count_nodes(store: Store, identity: LakeIdentity) -> int:
    """Count the mounts with a fresh record, by LIST alone (1,000 records a page) and by the store's clock alone.

    A killed mount stops counting after three of the longest intervals of a fleet of all these records.
    """
    listed = await store.list(nodes_prefix(identity.lake_id), ages=True)
    fresh_s = FRESH_INTERVALS * (1 + BEAT_SPREAD) * usual_beat_s(len(listed))
    return sum(entry.age_s <= fresh_s for entry in listed)


async def list_nodes_outside(store: Store, identity: LakeIdentity, groups: AbstractSet[str]) -> list[Entry]:
    """The records of groups other than `groups` (hashes of their names). They may be deleted: a mount that still
    runs writes its record again.
    """
    prefix = nodes_prefix(identity.lake_id)
    listed = await store.list(prefix)
    return [e for e in listed if e.key.removeprefix(prefix).partition("/")[0] not in groups]


def _key(identity: LakeIdentity, record: NodeRecord) -> str:
    return node_key(identity.lake_id, record.group, node_name(record.host, record.directory))
