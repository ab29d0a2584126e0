"""The reclaim floor: no reader or writer may rely on log versions and steps below it.

Create-if-absent is a compare-and-swap only while the slot stays occupied. Once a log slot is deleted, a sleeper
could create it again ("slot resurrection", hazard 1, SlateDB RFC 0026). So the floor is raised, in a sequence of
records that are themselves never deleted, *before* anything below it is deleted. Each process that acted on a slot
checks afterwards that the floor had not passed it. One GET answers "has it moved?".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from stepfs import entropy
from stepfs.clock import Clock
from stepfs.errors import CorruptError
from stepfs.format.ids import Step, Version
from stepfs.format.keys import floor_prefix, numbered
from stepfs.format.records import (
    GRACE_MS_DEFAULT,
    RECORD_ID_BYTES,
    FloorRecord,
    LakeIdentity,
    decode_floor,
    encode_floor,
)
from stepfs.lake.sequence import Mine, SlotOutcome, last_dense_number, take_slot
from stepfs.store.api import Store


@dataclass(slots=True)
class Floor:
    """The newest floor record known. One per reader or writer; not shared between tasks that refresh."""

    store: Store
    identity: LakeIdentity
    number: int = -1
    record: FloorRecord | None = None
    _tombstones: tuple[int, Mapping[str, int]] = (-1, MappingProxyType({}))  # number of the listing record

    @property
    def floor(self) -> Version:
        return self.record.floor if self.record else Version(0)

    @property
    def first_live_step(self) -> Step:
        return self.record.first_live_step if self.record else Step(0)

    @property
    def closing(self) -> Step:
        """A reclaimer has announced to delete the steps below this. A group that newly needs one first withdraws the
        announcement (`take_back`)."""
        return self.record.closing if self.record else Step(0)

    @property
    def deleted_bytes(self) -> int:
        return self.record.deleted_bytes if self.record else 0

    @property
    def grace_s(self) -> float:
        """How long a superseded group record still counts, for the reclaimer that wrote the newest floor record."""
        return self.record.grace_s if self.record else GRACE_MS_DEFAULT / 1000

    async def tombstones(self) -> Mapping[str, int]:
        """Newest slots of groups that are retired, by the name of their directory; some may be missing.

        At most one GET per list: a record that does not change the list only names the record that holds it.
        """
        record = self.record
        if record is None:
            return {}
        if record.tombstones:
            return record.tombstones
        if record.tombstones_at != self._tombstones[0]:
            listing = await self._read(record.tombstones_at) if record.tombstones_at >= 0 else None
            self._tombstones = record.tombstones_at, listing.tombstones if listing else {}
        return self._tombstones[1]

    def successor(self, clock: Clock, **changes: Any) -> FloorRecord:
        """The record to put into the next slot: the newest known one with these fields changed."""
        record = self.record or FloorRecord(b"", Version(0), Step(0), Step(0), 0, 0)
        where = self.number if record.tombstones else record.tombstones_at
        if "tombstones" not in changes:
            changes |= {"tombstones": {}, "tombstones_at": where}
        else:
            changes["tombstones_at"] = -1
        return replace(record, record_id=entropy.token(RECORD_ID_BYTES), time_ms=clock.now_ms(), **changes)

    async def refresh(self) -> bool:
        """Move to the newest record; one GET when nothing is new. True if there was a newer one."""
        seen: dict[int, FloorRecord] = {}

        async def exists(number: int) -> bool:
            record = await self._read(number)
            if record is not None:
                seen[number] = record
            return record is not None

        newest = await last_dense_number(self.number, exists)
        if newest == self.number:
            return False
        record = seen[newest]
        if record.floor < self.floor or record.first_live_step < self.first_live_step:
            raise CorruptError(f"{self._key(newest)}: the floor went backwards; restore it from a backup")
        self.number, self.record = newest, record
        return True

    async def append(self, record: FloorRecord) -> SlotOutcome:
        """Try to take the slot directly after the newest known record. On `Mine`, `self.record` becomes `record`."""
        assert record.floor >= self.floor
        assert record.first_live_step >= self.first_live_step
        number = self.number + 1
        outcome = await take_slot(self.store, self._key(number), encode_floor(self.identity.lake_id, record))
        if isinstance(outcome, Mine):
            self.number, self.record = number, record
        return outcome

    async def take_back(self, clock: Clock) -> SlotOutcome:
        """Take the next slot, which withdraws the announcement of the newest record: no reclaim is under way any more.

        A reclaimer advances only in the slot directly after its own closing record. If another writer takes that slot,
        the reclaimer starts over and lists the groups again; earlier announcements ended in the same way. So the
        record in that slot may lower `closing` to the first live step, and no clock is needed to decide whether the
        announcer lives.
        """
        assert self.record is not None
        return await self.append(self.successor(clock, closing=self.first_live_step))

    def _key(self, number: int) -> str:
        return numbered(floor_prefix(self.identity.lake_id), number)

    async def _read(self, number: int) -> FloorRecord | None:
        key = self._key(number)
        data = await self.store.get(key)
        if data is None:
            return None
        lake_id, record = decode_floor(data, key)
        if lake_id != self.identity.lake_id:
            raise CorruptError(f"{key}: belongs to lake {lake_id}, not {self.identity.lake_id}")
        return record
