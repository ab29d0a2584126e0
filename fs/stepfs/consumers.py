"""Consumer groups: which durable checkpoints a training run keeps, and so which steps it may still need.

Each group is a sequence of records, each holding the whole set, so only the greatest slot counts and older ones are
trimmed. A slot that was trimmed can be taken again by a sleeper; a LIST after the create shows that it is not the
greatest, and the sleeper starts over. There are no leases: a group counts until it is retired (COMMIT.md, hazard 10).

A record that makes a group need *earlier* steps races with a reclaimer that is giving those steps up. Both write
first and look afterwards: the reclaimer announces the step it closes at and then lists the groups, the group writes
its record and then reads the floor. At least one of them sees the other. A group that sees an announcement above a
step it brings takes the reclaimer's next floor slot (`Floor.take_back`): the reclaimer starts over and lists again,
and an announcement whose reclaimer is dead stands in nobody's way. Only what is gone already is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

import trio

from stepfs import entropy, retention
from stepfs.clock import Clock, SystemClock
from stepfs.errors import (
    AbsentError,
    CorruptError,
    RefusedError,
    StepfsError,
    StoreUnreachableError,
    UsageError,
    WithdrawnError,
)
from stepfs.floor import Floor
from stepfs.format.ids import Step
from stepfs.format.keys import group_prefix, numbered
from stepfs.format.records import (
    KEPT_CHECKPOINTS_MAX,
    RECORD_ID_BYTES,
    ConsumerRecord,
    LakeIdentity,
    check_id,
    encode_consumer,
)
from stepfs.group_records import Slots, read_latest, slots_of, superseded
from stepfs.retention import Order
from stepfs.sequence import Mine, Unknown, take_slot
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.checkpoints")

_ROUNDS_MAX: Final = 32
_RETRY_S: Final = 0.05
_NOTHING_OPENED: Final = Step(0)

Change = Callable[
    [ConsumerRecord | None, Step], ConsumerRecord
]  # (newest record, first live step) → next record


@dataclass(frozen=True, slots=True)
class Group:
    """One consumer group of one lake, by name."""

    store: Store
    identity: LakeIdentity
    name: str
    clock: Clock

    @classmethod
    def of(cls, store: Store, identity: LakeIdentity, name: str, clock: Clock | None = None) -> Group:
        """`UsageError` for a name that cannot be one."""
        return cls(store, identity, check_id(name, "group"), clock or SystemClock())

    async def read(self) -> ConsumerRecord | None:
        """The newest record; None if the group was never registered."""
        return (await self.newest())[1]

    async def register(self) -> ConsumerRecord:
        """Make the group exist; it keeps every live step until its first checkpoint. Idempotent.

        What the record returned needs is there for good, whoever wrote that record.
        """
        for _ in range(_ROUNDS_MAX):
            try:
                return await self._write(self._joined, whole=True)
            except WithdrawnError:
                continue  # a reclaimer advanced meanwhile; what is live after that is still all there is
        raise RefusedError(f"group {self.name!r}: reclaimers keep moving; try again")

    async def add(self, next_step: Step, *, keep: int | None = None) -> ConsumerRecord:
        """A durable checkpoint exists that resumes at `next_step`. With `keep`, so many of those recorded last stay.

        Checkpoints beyond `next_step` do not count and stay, too: see `retention`. Raises `WithdrawnError` when steps
        it needs are reclaimed already.
        """
        if keep is not None and keep < 1:
            raise UsageError(f"--keep {keep}: keep at least one checkpoint, or retire the group")
        return await self._reorder(lambda order: retention.add(order, next_step, keep), next_step)

    async def resumed(self, next_step: Step) -> ConsumerRecord:
        """Training goes on from the checkpoint at `next_step`, which is kept from now on if it was not.

        Nothing is dropped: one can still go back to a greater checkpoint, until the trainer has passed it with `keep`.
        Raises `WithdrawnError` when steps it needs are reclaimed already.
        """
        return await self._reorder(lambda order: retention.resume(order, next_step), next_step)

    async def _reorder(self, change_order: Callable[[Order], Order], next_step: Step) -> ConsumerRecord:
        def change(old: ConsumerRecord | None, first_live: Step) -> ConsumerRecord:
            base = self._joined(old, first_live)
            record = retention.with_order(base, change_order(base.order))
            self._check_number(len(record.kept))
            return record

        return await self._write(change, brings=frozenset({next_step}), fences=True)

    async def drop(self, next_step: Step) -> ConsumerRecord:
        """That checkpoint is gone. `AbsentError` if it was not kept."""
        seen = False  # a second look may find it gone by our own record, which somebody followed at once (hazard 2)

        def change(old: ConsumerRecord | None, first_live: Step) -> ConsumerRecord:
            nonlocal seen
            del first_live
            if old is None or old.retired or not (seen or next_step in old.kept):
                raise AbsentError(f"group {self.name!r} keeps no checkpoint with next step {next_step}")
            seen = True
            kept = frozenset(old.kept) - {next_step}
            return replace(retention.with_order(old, retention.set_to(old.order, kept)), start=old.need)

        return await self._write(change)

    async def replace(self, kept: frozenset[Step]) -> ConsumerRecord:
        """The kept checkpoints are exactly these now."""
        return await self.revise(lambda _: kept, brings=kept)

    async def revise(
        self,
        change_kept: Callable[[frozenset[Step]], frozenset[Step]],
        *,
        brings: frozenset[Step],
        opened: Step = _NOTHING_OPENED,
    ) -> ConsumerRecord:
        """The kept checkpoints become what `change_kept` makes of those kept now, whoever has changed them meanwhile.

        `brings`: which of them the caller vouches for. Raises `WithdrawnError`, with those that come too late.
        `opened` goes into the record together with a change, as in `note_opened`; alone it is no change.
        """

        def change(old: ConsumerRecord | None, first_live: Step) -> ConsumerRecord:
            base = self._joined(old, first_live)
            kept = change_kept(frozenset(base.kept))
            self._check_number(len(kept))
            if kept == frozenset(base.kept):
                return old or base  # a retired group is not brought back by what changes nothing
            record = retention.with_order(base, retention.set_to(base.order, kept))
            return replace(record, start=base.need, opened=max(base.opened, opened))

        return await self._write(change, brings=brings)

    async def note_opened(self, opened: Step, *, known: Step | None = None) -> ConsumerRecord:
        """`opened` is one past the greatest step that a reader of the group has opened: so far checkpoints are believed.

        With `known`, only if that is what the record says still: else another mount has just said it. `AbsentError` if
        there is no group.
        """

        def change(old: ConsumerRecord | None, _first_live: Step) -> ConsumerRecord:
            if old is None:
                raise self._absent()
            if old.retired or old.opened >= opened or known not in (None, old.opened):
                return old
            return replace(old, opened=opened)

        return await self._write(change)

    def _absent(self) -> AbsentError:
        return AbsentError(f"there is no group {self.name!r} in {self.store.url}; see `stepfs status`")

    def _check_number(self, kept: int) -> None:
        if kept > KEPT_CHECKPOINTS_MAX:
            raise UsageError(
                f"group {self.name!r} would keep {kept} checkpoints, at most {KEPT_CHECKPOINTS_MAX} can be recorded; drop old "
                "ones (--keep), or delete them"
            )

    async def retire(self) -> ConsumerRecord:
        """The run is over: the group no longer holds anything back. Idempotent."""

        def change(old: ConsumerRecord | None, _first_live: Step) -> ConsumerRecord:
            if old is None:
                raise self._absent()
            return replace(old, retired=True)

        try:
            return await self._write(change)
        except CorruptError:
            return await self._retire_damaged()

    async def _retire_damaged(self) -> ConsumerRecord:
        """Put a retired record after one that cannot be read: of a run that is over, nothing in it is needed."""
        floor = Floor(self.store, self.identity)
        await floor.refresh()
        number = max((slot for slot, _ in await self._slots()), default=-1) + 1
        record = self._next(self._joined(None, Step(0)), retired=True)
        if not await self._take(number, record):
            raise RefusedError(f"group {self.name!r} is being changed by others all the time; try again")
        await self._trim(floor.grace_s)
        return record

    async def _write(
        self,
        change: Change,
        *,
        brings: frozenset[Step] = frozenset(),
        whole: bool = False,
        fences: bool = False,
    ) -> ConsumerRecord:
        """Make `change` the newest record, or return that one if it says the same already.

        `brings` are the checkpoints that it may add; with `whole`, the caller relies on all that the record needs. A
        record that is found is believed as far as one that is written: after a look at the floor, taken afterwards.

        With `fences`, a slot is taken by this call, or was taken from it, even if the newest record says the same: a
        request that somebody got no answer to, and that would undo this, is aimed at the next slot and may still land.
        """
        floor = Floor(self.store, self.identity)
        former: ConsumerRecord | None = None
        landed: set[bytes] = set()  # records of this call that were, for a moment at least, the newest
        for attempt in range(_ROUNDS_MAX):
            await trio.sleep(entropy.uniform(0, _RETRY_S * min(attempt, 8)))
            await floor.refresh()
            slots = await self._slots(ages=True)
            number, found = await self._newest_of(slots)
            old = found and retention.surviving(found, floor.first_live_step)
            if not landed:
                former = old
            record = change(old, floor.first_live_step)
            late = _gone(former, record, brings, floor)
            if not late:
                believed = attempt > 0 or not fences  # then somebody else has taken the slot meanwhile
                placed = await self._place(record, number, found if believed else None, landed)
                if placed is None:
                    continue
                number, record = placed
                await floor.refresh()
                late = _gone(former, record, brings, floor)
            if late:
                await self._withdraw(former, landed, late, floor.grace_s)
                raise WithdrawnError(
                    f"group {self.name!r}: steps from {min(late)} on are needed, but those below "
                    f"{floor.first_live_step} are reclaimed; nothing was recorded. Resume from a later checkpoint, or "
                    "start a new lake",
                    late,
                )
            relied = {*brings, record.need} if whole or former is None or former.retired else brings
            if record.retired or await self._is_safe(relied, floor):
                self._tell_left_out(found, old, floor)
                if landed or superseded(slots, floor.grace_s):
                    await self._trim(floor.grace_s)
                return record
        raise RefusedError(f"group {self.name!r} is being changed by others all the time; try again")

    async def _place(
        self, record: ConsumerRecord, newest: int, found: ConsumerRecord | None, landed: set[bytes]
    ) -> tuple[int, ConsumerRecord] | None:
        """(slot, record) of what is the newest now and says `record`: found there, or written. None: others were faster."""
        if found is not None and retention.equal(record, found):
            return newest, found
        record = self._next(record)
        outcome = await self._take(newest + 1, record)
        if outcome is not None:
            landed.add(record.record_id)
        return (newest + 1, record) if outcome else None

    async def _is_safe(self, relied: AbstractSet[Step], floor: Floor) -> bool:
        """Whether no reclaimer can give up what is `relied` on, which was on record before `floor` was refreshed.

        An announcer may have listed the groups before the record, or an equal one of a dead writer, landed: then the
        floor's next slot decides. Ours takes the announcement back; anybody else's but its own advance ended it too.
        """
        need = min(relied, default=floor.closing)
        if need >= floor.closing:
            return True
        if need < floor.first_live_step:
            return False  # the announcement was followed: there is nothing to take back
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
        """Take back what `landed`: restore the former set, or take `late` out of what others made of it since."""
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
        """Create slot `number`: True if it is ours *and* the greatest, False if ours but not that, None if not ours."""
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
        """Remove the records that count for no reclaimer any more; those within its grace are somebody's way back."""
        try:
            if older := superseded(await self._slots(ages=True), grace_s):
                await self.store.delete(older)
        except StepfsError as error:  # what counts stands; the next change trims again
            _log.info("group %r: old records stay for now: %s", self.name, error)

    def _joined(self, old: ConsumerRecord | None, first_live: Step) -> ConsumerRecord:
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
        """`old` as a record of its own."""
        record = old if kept is None else retention.with_order(old, retention.set_to(old.order, kept))
        return replace(
            record,
            record_id=entropy.token(RECORD_ID_BYTES),
            retired=record.retired if retired is None else retired,
            time_ms=self.clock.now_ms(),
        )


def _gone(
    former: ConsumerRecord | None, new: ConsumerRecord, brings: frozenset[Step], floor: Floor
) -> frozenset[Step]:
    """What of `new` comes too late: steps below the first live one.

    Only what this call brings counts: a checkpoint that somebody else has added is theirs to answer for.
    """
    if new.retired:
        return frozenset()
    needed = {*brings, new.need} if former is None or former.retired else brings
    return frozenset(step for step in needed if step < floor.first_live_step)
