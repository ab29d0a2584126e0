"""The fleet view: one small object per mount with a group, rewritten now and then, removed at unmount.

Nothing is decided by it: a mount that cannot write it goes on, one that was killed leaves it behind until the next mount
at the same place takes it over, and the records of a group that is gone go with the next reclaim.
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

BEAT_S: Final = 10.0  # from one record of a mount to the next, unless there are many mounts
BEAT_SPREAD: Final = 0.75  # in a large fleet the intervals are so much longer, at random
FRESH_INTERVALS: Final = 3  # silent for longer: it was killed, or its store is away, or a clock is wrong
_BEAT_S_PER_NODE: Final = 1 / 20
_RECORD_BYTES_MAX: Final = 1 << 16
_READS_MAX: Final = 16


async def write_node(store: Store, identity: LakeIdentity, record: NodeRecord) -> None:
    """Rewrite this mount's record."""
    await store.put(_key(identity, record), [encode_node(identity.lake_id, record)])


async def remove_node(store: Store, identity: LakeIdentity, record: NodeRecord) -> None:
    """This mount is gone. Idempotent."""
    await store.delete([_key(identity, record)])


async def list_nodes(store: Store, identity: LakeIdentity) -> list[NodeRecord]:
    """What mounts said last, by group and place. Unreadable records are left out: they inform nobody."""
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
    """Seconds from one record of a mount to the next in a fleet of so many mounts, before the random part."""
    return max(BEAT_S, nodes * _BEAT_S_PER_NODE)


async def count_nodes(store: Store, identity: LakeIdentity) -> int:
    """How many mounts have a fresh record, in one LIST (1,000 records each): nothing is read, and the store's clock alone
    is asked. Mounts that were killed stop counting after three of the longest intervals of a fleet of all these records.
    """
    listed = await store.list(nodes_prefix(identity.lake_id), ages=True)
    fresh_s = FRESH_INTERVALS * (1 + BEAT_SPREAD) * usual_beat_s(len(listed))
    return sum(entry.age_s <= fresh_s for entry in listed)


async def list_nodes_outside(store: Store, identity: LakeIdentity, groups: AbstractSet[str]) -> list[Entry]:
    """The records of groups other than `groups` (hashes of their names). They may go: a mount that still runs says so
    again by itself.
    """
    prefix = nodes_prefix(identity.lake_id)
    listed = await store.list(prefix)
    return [e for e in listed if e.key.removeprefix(prefix).partition("/")[0] not in groups]


def _key(identity: LakeIdentity, record: NodeRecord) -> str:
    return node_key(identity.lake_id, record.group, node_name(record.host, record.directory))
