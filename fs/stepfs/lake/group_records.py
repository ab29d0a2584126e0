"""Reading the groups of a lake: which records of each group count, and their contents.

Separate from `groups`, which changes one group, because reclaim, `status` and producers that wait only read.

For all readers but a reclaimer only the newest record counts. A reclaimer grants a *grace* in which a mistake (a
wrong number, a group retired too early) can be corrected: a record goes on counting until its successor is `grace`
old. Both ages are the store's own, from one LIST. So a group's writers must not trim records that still count. A
writer that does (stepfs before this rule) only makes a reclaimer wait: it knows that a record is missing, not its
contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stepfs.errors import CorruptError
from stepfs.format.keys import consumers_prefix, number_of, numbered
from stepfs.format.records import ConsumerRecord, LakeIdentity, decode_consumer
from stepfs.lake.floor import Floor
from stepfs.store.api import Entry, Store

_FLOOR_PAYS_FROM = (
    4  # groups: up to here reading their records costs no more than reading the floor's list of them
)


Slots = tuple[tuple[int, Entry], ...]  # by slot, ascending


@dataclass(frozen=True, slots=True)
class GroupSlots:
    """The listed records of one group, ascending; there is at least one."""

    prefix: str
    entries: Slots

    @property
    def directory(self) -> str:
        """The group's hash."""
        return self.prefix.rstrip("/").rpartition("/")[2]

    @property
    def newest(self) -> int:
        return self.entries[-1][0]


@dataclass(frozen=True, slots=True)
class Counting:
    """Which listed records of a group count, at some grace."""

    earlier: tuple[int, ...]  # besides the newest, ascending
    began: bool  # slot 0 is younger than grace: the group did not exist for a part of that time
    unknown: bool  # a record that counts was trimmed


def slots_of(prefix: str, entries: Iterable[Entry]) -> Slots:
    """The slots of the group under `prefix` among `entries`."""
    return tuple((n, entry) for entry in entries if (n := number_of(prefix, entry.key)) is not None)


def counting(slots: Slots, grace_s: float) -> Counting:
    """A record counts until its successor is `grace_s` old; the newest always."""
    present = {number for number, _ in slots}
    earlier: list[int] = []
    began = unknown = False
    for number, entry in slots:
        if entry.age_s >= grace_s:
            continue
        if number == 0:
            began = True
        elif number - 1 in present:
            earlier.append(number - 1)
        else:
            unknown = True
    return Counting(tuple(earlier), began=began, unknown=unknown)


def superseded(slots: Slots, grace_s: float) -> list[str]:
    """Keys of records that no longer count."""
    if not slots:
        return []
    counts = {slots[-1][0], *counting(slots, grace_s).earlier}
    return [entry.key for number, entry in slots if number not in counts]


async def list_slots(store: Store, identity: LakeIdentity, *, ages: bool = False) -> list[GroupSlots]:
    """The listed records of every group."""
    found: dict[str, list[tuple[int, Entry]]] = {}
    for entry in await store.list(consumers_prefix(identity.lake_id), ages=ages):
        directory, slash, _ = entry.key.rpartition("/")
        number = number_of(f"{directory}/", entry.key) if slash else None
        if number is not None:
            found.setdefault(f"{directory}/", []).append((number, entry))
    return [GroupSlots(prefix, tuple(slots)) for prefix, slots in found.items()]


async def list_groups(
    store: Store, identity: LakeIdentity, floor: Floor | None = None
) -> dict[str, ConsumerRecord]:
    """The newest record of every group, by name. `CorruptError` if one is unreadable.

    Retired groups are among them. With `floor` (keep one instance across calls) those that the floor record lists
    are left out and cost no request.
    """
    listed = await list_slots(store, identity)
    retired: Mapping[str, int] = {}
    if floor is not None and len(listed) > _FLOOR_PAYS_FROM:
        await floor.refresh()
        retired = await floor.tombstones()
    groups = {}
    for slots in listed:
        if retired.get(slots.directory) != slots.newest:
            _, record = await read_latest(store, identity, slots.prefix, slots.newest)
            groups[record.group] = record
    return groups


async def read_latest(
    store: Store, identity: LakeIdentity, prefix: str, number: int
) -> tuple[int, ConsumerRecord]:
    """(number, record) of slot `number`, or of its replacement if it was trimmed since the LIST."""
    while True:
        record = await read_slot(store, identity, prefix, number)
        if record is not None:
            return number, record
        slots = slots_of(prefix, await store.list(prefix))
        if not slots or slots[-1][0] <= number:
            raise CorruptError(f"{prefix}: the group's newest record vanished; restore it")
        number = slots[-1][0]


async def read_slot(store: Store, identity: LakeIdentity, prefix: str, number: int) -> ConsumerRecord | None:
    """The record in one slot; None if the slot is empty or was trimmed."""
    key = numbered(prefix, number)
    data = await store.get(key)
    if data is None:
        return None
    lake_id, record = decode_consumer(data, key)
    if lake_id != identity.lake_id:
        raise CorruptError(f"{key}: belongs to lake {lake_id}, not {identity.lake_id}")
    return record
