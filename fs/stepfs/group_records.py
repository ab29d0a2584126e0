"""Reading the groups of a lake: which record of each counts, and what it says.

Apart from `consumers`, which changes one group, because reclaim, `status` and held-back producers only look.
"""

from __future__ import annotations

from stepfs.errors import CorruptError
from stepfs.format.keys import consumers_prefix, number_of, numbered
from stepfs.format.records import ConsumerRecord, LakeIdentity, decode_consumer
from stepfs.store.api import Store


async def list_groups(store: Store, identity: LakeIdentity) -> dict[str, ConsumerRecord]:
    """The newest record of every group, retired ones included, by name. `CorruptError` if one is unreadable."""
    prefix = consumers_prefix(identity.lake_id)
    newest: dict[str, int] = {}
    for entry in await store.list(prefix):
        directory, slash, _ = entry.key.rpartition("/")
        number = number_of(f"{directory}/", entry.key) if slash else None
        if number is not None:
            newest[f"{directory}/"] = max(number, newest.get(f"{directory}/", -1))
    groups = {}
    for group, number in newest.items():
        _, record = await read_latest(store, identity, group, number)
        groups[record.group] = record
    return groups


async def read_latest(
    store: Store, identity: LakeIdentity, prefix: str, number: int
) -> tuple[int, ConsumerRecord]:
    """Slot `number`, or what replaced it if it was trimmed since it was listed; with its number."""
    while True:
        key = numbered(prefix, number)
        data = await store.get(key)
        if data is not None:
            lake_id, record = decode_consumer(data, key)
            if lake_id != identity.lake_id:
                raise CorruptError(f"{key}: belongs to lake {lake_id}, not {identity.lake_id}")
            return number, record
        slots = [n for entry in await store.list(prefix) if (n := number_of(prefix, entry.key)) is not None]
        if not slots or slots[-1] <= number:
            raise CorruptError(f"{prefix}: the group's newest record vanished; restore it")
        number = slots[-1]
