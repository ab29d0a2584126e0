"""The groups as a reclaimer needs them: the newest record of each, and the earlier records that still count.

One LIST, and one GET per new record: records are immutable and the greatest slot of a group is never trimmed, so a
slot is read at most once, and a tombstone that the floor record lists is never read.

Between the LIST and the GET a slot may be trimmed, and taken again by a slow writer. So a record is certain only when a
later LIST shows its slot as the greatest still: a look is `certain` if it read none. Without a change that is the first
one that a reclaimer takes after the look that it planned with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from stepfs.errors import CorruptError, StepfsError
from stepfs.format.records import ConsumerRecord, LakeIdentity
from stepfs.lake.floor import Floor
from stepfs.lake.group_records import GroupSlots, counting, list_slots, read_slot, superseded
from stepfs.lake.reclaim.plan import GroupEvidence
from stepfs.store.api import Entry, Store

_AT_ONCE: Final = 16
_LOOKS_MAX: Final = 8

_Slot = tuple[str, int]  # prefix of a group, number


@dataclass(frozen=True, slots=True)
class Look:
    """The groups at one moment, and the leftover records that no longer count."""

    groups: tuple[GroupEvidence, ...]
    spent: tuple[Entry, ...]
    certain: bool  # every record in it was read before its LIST

    @property
    def live_directories(self) -> set[str]:
        return {group.directory for group in self.groups if group.live}

    @property
    def tombstones(self) -> dict[str, int]:
        """Slots of groups that have been retired for longer than grace: their records will never count again."""
        return {g.directory: g.slot for g in self.groups if g.settled and not g.live}


class GroupWatch:
    """Reads the groups of one lake repeatedly, and remembers the records."""

    def __init__(self, store: Store, identity: LakeIdentity, grace_s: float) -> None:
        self._store = store
        self._identity = identity
        self._grace_s = grace_s
        self._known: dict[_Slot, ConsumerRecord] = {}

    async def look(self, floor: Floor) -> Look:
        """`floor`: as refreshed by the caller, for its tombstones. `CorruptError` if a newest record is unreadable."""
        vanished: set[_Slot] = set()
        for _ in range(_LOOKS_MAX):
            listed = await list_slots(self._store, self._identity, ages=True)
            tombstones = await floor.tombstones() if listed else {}
            buried = {
                slots.prefix
                for slots in listed
                if tombstones.get(slots.directory) == slots.newest
                and slots.entries[-1][1].age_s >= self._grace_s
            }
            certain = not await self._read(listed, buried)
            newest = {(slots.prefix, slots.newest) for slots in listed if slots.prefix not in buried}
            gone = newest - self._known.keys()
            if not gone:
                groups = tuple(self._evidence(slots, slots.prefix in buried) for slots in listed)
                spent = [key for slots in listed for key in superseded(slots.entries, self._grace_s)]
                by_key = {entry.key: entry for slots in listed for _, entry in slots.entries}
                return Look(groups, tuple(by_key[key] for key in spent), certain)
            if gone & vanished:
                break
            vanished = gone  # trimmed since the LIST: there is a newer one
        raise CorruptError(f"{min(vanished)[0]}: the group's newest record vanished; restore it")

    async def _read(self, listed: Sequence[GroupSlots], buried: set[str]) -> int:
        """Read every record that counts and is not known yet; forget the others. Returns how many it looked for."""
        wanted = [
            (slots.prefix, number)
            for slots in listed
            if slots.prefix not in buried
            for number in (*counting(slots.entries, self._grace_s).earlier, slots.newest)
        ]
        known = {slot: self._known[slot] for slot in wanted if slot in self._known}
        self._known = known
        newest = {(slots.prefix, slots.newest) for slots in listed}
        new = [slot for slot in wanted if slot not in known]
        for start in range(0, len(new), _AT_ONCE):
            failed: list[StepfsError] = []
            async with trio.open_nursery() as nursery:
                for slot in new[start : start + _AT_ONCE]:
                    nursery.start_soon(self._read_one, slot, slot in newest, failed)
            if failed:
                raise failed[0]
        return len(new)

    async def _read_one(self, slot: _Slot, is_newest: bool, failed: list[StepfsError]) -> None:
        try:
            record = await read_slot(self._store, self._identity, *slot)
        except CorruptError as error:
            if is_newest:  # else: its need is unknown, as if the record were trimmed
                failed.append(error)
        except StepfsError as error:  # a nursery would wrap it into a group
            failed.append(error)
        else:
            if record is not None:
                self._known[slot] = record

    def _evidence(self, slots: GroupSlots, buried: bool) -> GroupEvidence:
        found = counting(slots.entries, self._grace_s)
        earlier = [self._known.get((slots.prefix, number)) for number in found.earlier]
        return GroupEvidence(
            directory=slots.directory,
            slot=slots.newest,
            newest=None if buried else self._known[slots.prefix, slots.newest],
            earlier=tuple(record for record in earlier if record is not None),
            began=found.began,
            unknown=found.unknown or None in earlier,
            settled=slots.entries[-1][1].age_s >= self._grace_s,
        )
