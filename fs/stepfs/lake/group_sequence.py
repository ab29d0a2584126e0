"""Writing the records of one consumer group: the next slot of its sequence, made safe against reclaimers.

Each group is a sequence of records, each holding the whole set, so only the greatest slot counts and older ones are
trimmed. A writer that slept can take a trimmed slot again; its LIST after the create shows that the slot is not the
greatest, and it starts over.

A record that makes a group need *earlier* steps races with a reclaimer that is about to delete them. Both write
first and read afterwards: the reclaimer announces the step below which it deletes and then lists the groups; the group
writes its record and then reads the floor. At least one of them sees the other. A group that sees an announcement
above a step it brings takes the reclaimer's next floor slot (`Floor.take_back`). Then the reclaimer starts over and
lists again, and the announcement of a dead reclaimer blocks no group. Only steps that are already deleted are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

import trio

from stepfs import entropy
from stepfs.clock import Clock
from stepfs.errors import (
    CorruptError,
    RefusedError,
    StepfsError,
    StoreUnreachableError,
    WithdrawnError,
)
from stepfs.format.ids import Step
from stepfs.format.keys import group_prefix, numbered
from stepfs.format.records import (
    RECORD_ID_BYTES,
    ConsumerRecord,
    LakeIdentity,
    encode_consumer,
)
from stepfs.lake import retention
from stepfs.lake.floor import Floor
from stepfs.lake.group_records import Slots, read_latest, slots_of, superseded
from stepfs.lake.sequence import Mine, Unknown, take_slot
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.checkpoints")

_ROUNDS_MAX: Final = 32
_RETRY_S: Final = 0.05

# (newest record, first live step) → next record
Change = Callable[[ConsumerRecord | None, Step], ConsumerRecord]


@dataclass(frozen=True, slots=True)
class GroupSequence:
    """The records of one group of one lake, by name."""

    store: Store
    identity: LakeIdentity
    name: str
    clock: Clock

    async def write(
        self,
        change: Change,
        *,
        brings: frozenset[Step] = frozenset(),
        whole: bool = False,
        fences: bool = False,
    ) -> ConsumerRecord:
        """Make the result of `change` the newest record, or return the newest one if it is equal already.

        The caller relies on the checkpoints in `brings`, and on others that the change adds to what it finds; with
        `whole`, on every step that the record needs. An equal record that is found counts like one that is written:
        only after a later look at the floor.

        With `fences`, this call takes a slot, or loses one to another writer, even if the newest record is equal: an
        earlier request without a reply, which would undo this change, is aimed at the next slot and may still arrive.
        """
        floor = Floor(self.store, self.identity)
        former: ConsumerRecord | None = None  # the newest set of other writers, for an undo
        joins = True  # no record of the group counted when this call began
        landed: set[bytes] = set()  # records of this call that were the newest, for a moment at least
        added: set[Step] = set()  # by this call, to the sets of other writers
        for attempt in range(_ROUNDS_MAX):
            await trio.sleep(entropy.uniform(0, _RETRY_S * min(attempt, 8)))
            await floor.refresh()
            slots = await self._slots(ages=True)
            number, found = await self._newest_of(slots)
            old = found and retention.surviving(found, floor.first_live_step)
            if found is None or found.record_id not in landed:
                former = old
            if not landed:
                joins = old is None or old.retired
            record = change(old, floor.first_live_step)
            added = (added | (set(record.kept) - set(old.kept if old is not None else ()))) & set(record.kept)
            brought = brings | added
            late = _gone(record, brought, floor, whole=joins)
            if not late:
                believed = attempt > 0 or not fences  # on a retry another writer has taken the slot
                placed = await self._place(record, number, found if believed else None, landed)
                if placed is None:
                    continue
                number, record = placed
                await floor.refresh()
                late = _gone(record, brought, floor, whole=joins)
            if late:
                await self._withdraw(former, landed, late, floor.grace_s)
                raise WithdrawnError(
                    f"group {self.name!r}: steps from {min(late)} on are needed, but those below "
                    f"{floor.first_live_step} are reclaimed; nothing was recorded. Resume from a later checkpoint, or "
                    "start a new lake",
                    late,
                )
            relied = {*brought, record.need} if whole or joins else brought
            if record.retired or await self._is_safe(relied, floor):
                self._tell_left_out(found, old, floor)
                if landed or superseded(slots, floor.grace_s):
                    await self._trim(floor.grace_s)
                return record
        raise RefusedError(f"group {self.name!r} is being changed by others all the time; try again")

    async def _place(
        self, record: ConsumerRecord, newest: int, found: ConsumerRecord | None, landed: set[bytes]
    ) -> tuple[int, ConsumerRecord] | None:
        """(slot, record) of the newest record, found equal to `record` or written. None: another writer was faster."""
        if found is not None and retention.equal(record, found):
            # Read after the LIST: meanwhile the slot may have been trimmed, and taken again by a slow writer.
            return (newest, found) if await self._is_greatest(newest) else None
        record = self._next(record)
        outcome = await self._take(newest + 1, record)
        if outcome is not None:
            landed.add(record.record_id)
        return (newest + 1, record) if outcome else None

    async def _is_safe(self, relied: AbstractSet[Step], floor: Floor) -> bool:
        """Whether no reclaimer can delete the steps in `relied`, which were on record before `floor` was refreshed.

        A reclaimer may have listed the groups before the record, or an equal one of a dead writer, arrived: then the
        floor's next slot decides. Our record there withdraws its announcement, and so does any other writer's, except the
        reclaimer's own advance.
        """
        need = min(relied, default=floor.closing)
        if need >= floor.closing:
            return True
        if need < floor.first_live_step:
            return False  # the reclaimer has advanced: too late to withdraw its announcement
        number = floor.number
        if isinstance(await floor.take_back(self.clock), Mine):
            return True
        await floor.refresh()
        return floor.number > number and need >= floor.first_live_step

    def _tell_left_out(
        self, found: ConsumerRecord | None, survives: ConsumerRecord | None, floor: Floor
    ) -> None:
        gone = sorted(set(found.kept) - set(survives.kept)) if found and survives else []
        if gone:
            _log.warning(
                "group %r: the checkpoints at %s are left out: steps below %d were reclaimed before they were on record; "
                "resume from a later one",
                self.name,
                gone,
                floor.first_live_step,
            )

    async def _withdraw(
        self, former: ConsumerRecord | None, landed: set[bytes], late: frozenset[Step], grace_s: float
    ) -> None:
        """Undo the records in `landed`: restore the former set, or remove `late` from the set that others wrote
        since."""
        number, newest = await self.newest()
        while newest is not None and not newest.retired:
            if newest.record_id in landed:
                restored = self._next(former or newest, retired=former is None or former.retired)
            elif late & set(newest.kept):
                rest = tuple(step for step in newest.order if step not in late)
                restored = self._next(retention.with_order(newest, rest or (former.order if former else ())))
            else:
                return
            if await self._take(number + 1, restored):
                await self._trim(grace_s)
                return
            number, newest = await self.newest()

    async def _take(self, number: int, record: ConsumerRecord) -> bool | None:
        """Create slot `number`. True: it is ours *and* the greatest. False: ours, but not the greatest. None: not
        ours."""
        prefix = group_prefix(self.identity.lake_id, self.name)
        body = encode_consumer(self.identity.lake_id, record)
        outcome = await take_slot(self.store, numbered(prefix, number), body)
        if isinstance(outcome, Unknown):
            raise StoreUnreachableError(
                f"{self.store.url}: the store stopped answering{outcome.why}; run `stepfs status` to see what group "
                f"{self.name!r} keeps, then try again"
            )
        if not isinstance(outcome, Mine):
            return None
        return await self._is_greatest(number)

    async def _is_greatest(self, number: int) -> bool:
        return [n for n, _ in await self._slots()][-1:] == [number]

    async def newest(self) -> tuple[int, ConsumerRecord | None]:
        """(slot, newest record); (-1, None) if the group was never registered."""
        return await self._newest_of(await self._slots())

    async def _newest_of(self, slots: Slots) -> tuple[int, ConsumerRecord | None]:
        if not slots:
            return -1, None
        prefix = group_prefix(self.identity.lake_id, self.name)
        number, record = await read_latest(self.store, self.identity, prefix, slots[-1][0])
        if record.group != self.name:
            raise CorruptError(
                f"the records of group {self.name!r} name {record.group!r}; restore them from a backup"
            )
        return number, record

    async def _slots(self, *, ages: bool = False) -> Slots:
        prefix = group_prefix(self.identity.lake_id, self.name)
        return slots_of(prefix, await self.store.list(prefix, ages=ages))

    async def _trim(self, grace_s: float) -> None:
        """Remove the records that count for no reclaimer any more. Those within its grace still allow a correction."""
        try:
            if older := superseded(await self._slots(ages=True), grace_s):
                await self.store.delete(older)
        except StepfsError as error:  # the newest record is written; the next change trims again
            _log.info("group %r: old records stay for now: %s", self.name, error)

    async def retire_damaged(self) -> ConsumerRecord:
        """Write a retired record after an unreadable one: a run that is over needs nothing from it."""
        floor = Floor(self.store, self.identity)
        await floor.refresh()
        number = max((slot for slot, _ in await self._slots()), default=-1) + 1
        record = self._next(self.joined(None, Step(0)), retired=True)
        if not await self._take(number, record):
            raise RefusedError(f"group {self.name!r} is being changed by others all the time; try again")
        await self._trim(floor.grace_s)
        return record

    def joined(self, old: ConsumerRecord | None, first_live: Step) -> ConsumerRecord:
        """The group's live record, or a fresh one that needs every live step."""
        if old is not None and not old.retired:
            return old
        return ConsumerRecord(
            record_id=entropy.token(RECORD_ID_BYTES),
            group=self.name,
            kept=(),
            start=first_live,
            retired=False,
            time_ms=self.clock.now_ms(),
        )

    def _next(
        self, old: ConsumerRecord, *, kept: tuple[Step, ...] | None = None, retired: bool | None = None
    ) -> ConsumerRecord:
        """A new record with the contents of `old`: an id and a time of its own."""
        record = old if kept is None else retention.with_order(old, retention.set_to(old.order, kept))
        return replace(
            record,
            record_id=entropy.token(RECORD_ID_BYTES),
            retired=record.retired if retired is None else retired,
            time_ms=self.clock.now_ms(),
        )


def _gone(new: ConsumerRecord, brings: frozenset[Step], floor: Floor, *, whole: bool) -> frozenset[Step]:
    """The checkpoints in `new` that come too late: steps below the first live one.

    Only the checkpoints that this call `brings` count, and with `whole` what the record needs; those of other writers
    are checked by those writers.
    """
    if new.retired:
        return frozenset()
    needed = {*brings, new.need} if whole else brings
    return frozenset(step for step in needed if step < floor.first_live_step)
