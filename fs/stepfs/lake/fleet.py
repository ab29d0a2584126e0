"""The fleet view: one small object per mount with a group, rewritten every 30 s, removed at unmount.

The records are informative only. A mount that cannot write its record goes on. A killed mount leaves its record behind
until the next mount at the same place takes it over.
"""

from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

import trio

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.identity import LakeIdentity
from stepfs.format.keys import component, node_key, nodes_prefix
from stepfs.format.node import NodeRecord, decode_node, encode_node, node_name
from stepfs.lake.concurrency import in_order
from stepfs.store.api import Entry, Store

BEAT_S: Final = 30.0  # from one record of a mount to the next
FRESH_S: Final = 3 * BEAT_S  # older: the mount was killed, or its store is away, or a clock is wrong
MOUNTS_MAX: Final = 1000  # that are counted
_RECORD_BYTES_MAX: Final = 1 << 16


async def write_node(store: Store, identity: LakeIdentity, record: NodeRecord) -> None:
    await store.put(_key(identity, record), [encode_node(identity.lake_id, record)])


async def remove_node(store: Store, identity: LakeIdentity, record: NodeRecord) -> None:
    await store.delete([_key(identity, record)])


async def list_nodes(store: Store, identity: LakeIdentity, groups: Iterable[str]) -> list[NodeRecord]:
    """The latest record of each mount of these groups, by group and place. Unreadable records are left out."""

    async def read(entry: Entry) -> NodeRecord | None:
        try:
            data = await store.get(entry.key, bytes_max=_RECORD_BYTES_MAX)
            lake_id, record = decode_node(data or b"", entry.key)
        except (CorruptError, NewerFormatError):
            return None  # or removed since it was listed
        return record if lake_id == identity.lake_id else None

    prefix = nodes_prefix(identity.lake_id)
    listed = [entry for group in groups for entry in await store.list(f"{prefix}{component(group)}/")]
    async with aclosing(in_order(listed, read)) as records:
        found = [record async for _, record in records if record is not None]
    return sorted(found, key=lambda record: (record.group, record.host, record.directory))


async def count_mounts(store: Store, identity: LakeIdentity) -> int:
    """How many mounts have written their records lately, by the store's clock: at most `MOUNTS_MAX`, by one LIST."""
    listed = await store.list(nodes_prefix(identity.lake_id), ages=True, limit=MOUNTS_MAX)
    return sum(entry.age_s <= FRESH_S for entry in listed)


class FleetLook:
    """The records as one that looks again and again needs them: read as often as mounts write them."""

    def __init__(self, store: Store, identity: LakeIdentity) -> None:
        self._store, self._identity = store, identity
        self._groups: frozenset[str] = frozenset()
        self._nodes: list[NodeRecord] = []
        self._looked_s = float("-inf")

    async def nodes(self, groups: Iterable[str]) -> list[NodeRecord]:
        """`list_nodes`, at most once in `BEAT_S` while the groups are the same."""
        wanted = frozenset(groups)
        if wanted != self._groups or trio.current_time() - self._looked_s >= BEAT_S:
            self._looked_s = trio.current_time()
            self._nodes = await list_nodes(self._store, self._identity, sorted(wanted))
            self._groups = wanted
        return self._nodes


def _key(identity: LakeIdentity, record: NodeRecord) -> str:
    return node_key(identity.lake_id, record.group, node_name(record.host, record.directory))
