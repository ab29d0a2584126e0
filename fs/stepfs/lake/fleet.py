"""The fleet view: one small object per mount with a group, rewritten every 30 s, removed at unmount.

The records are informative only. A mount that cannot write its record goes on. A killed mount leaves its record behind
until the next mount at the same place takes it over."""

from collections.abc import Iterable
from typing import Final

import trio

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.keys import component, node_key, nodes_prefix
from stepfs.format.node import NodeRecord, decode_node, encode_node, node_name
from stepfs.format.records import LakeIdentity
from stepfs.store.api import Store

BEAT_S: Final = 30.0  # from one record of a mount to the next
FRESH_S: Final = 3 * BEAT_S  # older: the mount was killed, or its store is away, or a clock is wrong
_RECORD_BYTES_MAX: Final = 1 << 16
_READS_MAX: Final = 16


async def write_node(store: Store, identity: LakeIdentity, record: NodeRecord) -> None:
    await store.put(_key(identity, record), [encode_node(identity.lake_id, record)])


async def remove_node(store: Store, identity: LakeIdentity, record: NodeRecord) -> None:
    await store.delete([_key(identity, record)])


async def list_nodes(store: Store, identity: LakeIdentity, groups: Iterable[str]) -> list[NodeRecord]:
    """The latest record of each mount of these groups, by group and place. Unreadable records are left out."""
    found: list[NodeRecord] = []
    limiter = trio.CapacityLimiter(_READS_MAX)

    async def read(key: str) -> None:
        async with limiter:
            try:
                data = await store.get(key, bytes_max=_RECORD_BYTES_MAX)
                lake_id, record = decode_node(data or b"", key)
            except (CorruptError, NewerFormatError):
                return  # or removed since it was listed
            if lake_id == identity.lake_id:
                found.append(record)

    async with trio.open_nursery() as nursery:
        for group in groups:
            for entry in await store.list(f"{nodes_prefix(identity.lake_id)}{component(group)}/"):
                nursery.start_soon(read, entry.key)
    return sorted(found, key=lambda record: (record.group, record.host, record.directory))


def _key(identity: LakeIdentity, record: NodeRecord) -> str:
    return node_key(identity.lake_id, record.group, node_name(record.host, record.directory))
