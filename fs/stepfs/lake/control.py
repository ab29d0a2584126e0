"""The control sequence: the needs of groups, and the floor, one record after another; and the verbs of a group.

A change reads the newest record, decides on it alone (`decisions`) and creates the next one; if another writer took that
slot, it decides again. A create without an answer comes first the next time, with the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from stepfs._internal import entropy
from stepfs._internal.clock import Clock, SystemClock
from stepfs.errors import CorruptError, OtherHistoryError, RefusedError, StoreUnreachableError, UsageError, command
from stepfs.format.codec import check_needs
from stepfs.format.control import (
    NOTHING_YET,
    RECORD_BYTES_MAX,
    RECORD_ID_BYTES,
    ControlRecord,
    GroupRecord,
    decode_control,
    encode_control,
)
from stepfs.format.identity import PACE_GROUP, LakeIdentity, check_group, check_id
from stepfs.format.ids import Step, Version
from stepfs.format.keys import control_prefix, numbered
from stepfs.lake.create_once import STRAY_GAP, Mine, Unknown, last_dense_number, last_number, listed_slots, take_slot
from stepfs.lake.decisions import Add, Advance, Drop, Pace, Register, Request, Resume, Retire, Revise, decide, successor
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.lake")

_ROUNDS_MAX: Final = 64
_RETRY_S: Final = 0.05
_SPREAD: Final = 3  # how much longer each further wait may be: of N writers, each tries about log N times
_SPREAD_S_MAX: Final = 4.0
_SLOW_S: Final = 10.0  # in which no store is put back: of a look, behind which a writer looks once more
_KEPT_S: Final = 60.0  # between looks whether the known record is still there, where no newer one comes
_LIST_AFTER_S: Final = 60.0  # without a look; a record that vanished since then must not hide those behind it


Look = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class Control:
    """The newest control record that one process knows. Safe from many tasks; it only moves forward."""

    store: Store
    identity: LakeIdentity
    clock: Clock = field(default_factory=SystemClock)
    number: int = -1
    record: ControlRecord = NOTHING_YET
    hint: int = 0  # a record that exists, if known: where the first look begins
    look_at_log: Look = trio.lowlevel.checkpoint  # raises if the log was lost that the changes of this process rest on
    astray: OtherHistoryError | None = None  # while the store lacks the record that is known here
    _looked_s: float = float("-inf")
    _seen_s: float = float("-inf")  # when the known record was there
    _former: tuple[int, bytes] | None = None  # number and id of one known before a silence, if it was not seen since
    _unanswered: tuple[int, ControlRecord, bytes] | None = None
    _changing: trio.Lock = field(default_factory=trio.Lock)

    @property
    def floor(self) -> Version:
        """The lowest log version that may still exist."""
        return self.record.floor

    def looked_within(self, seconds: float) -> bool:
        """Whether the newest record was looked for so lately."""
        return trio.current_time() - self._looked_s <= seconds

    @property
    def first_live_step(self) -> Step:
        return self.record.first_live_step

    @property
    def groups(self) -> Mapping[str, GroupRecord]:
        return self.record.groups

    def check_may_write(self) -> None:
        """`NewerFormatError` if who writes to this lake must know what this version does not."""
        check_needs(self.record.needs_of_writers, self.key(max(self.number, 0)))

    @property
    def is_unanswered(self) -> bool:
        """Whether a change of this process may have landed, or may still land."""
        return self._unanswered is not None

    async def refresh(self, *, listed: bool = False, lenient: bool = False, behind: int | None = None) -> bool:
        """Move to the newest record: one GET, or one LIST more, when nothing is new. True if there was a newer one.
        `OtherHistoryError`, within a minute of looks, if the store has lost the one that is known.

        A GET of the next number stops at a hole. So one that is about to take a slot looks by a LIST (`listed`; after it lost
        the slot `behind` a number, a LIST beyond that is new enough), and so does one that has not looked for long.
        `CorruptError` if the newest record is damaged, unless `lenient`: one that only reads goes on from the one before.
        """
        began_s = trio.current_time()
        moved = await self._moved(listed, lenient, behind)
        if not moved:  # else it waits: who is moved in a pause of the log has no time for it
            await self._check_kept(_SLOW_S if listed else _KEPT_S)
        if (
            listed and trio.current_time() - began_s > _SLOW_S
        ):  # the store was away, and may have been put back meanwhile
            await self._look_back()
        return moved

    async def _look_back(self) -> int:
        """Before a change that waited: the store may have been put back to a copy that lacks records, or commits alone."""
        newest = await self._find_newest(writes=True)
        if newest == self.number:  # else the next slot is taken
            await self._check_kept(0.0)
        await self.look_at_log()
        return newest

    async def _moved(self, listed: bool, lenient: bool, behind: int | None) -> bool:
        found: dict[int, bytes] = {}

        async def exists(number: int) -> bool:
            data = await self._body(number)
            if data is not None:
                found[number] = data
            return data is not None

        now_s, known = trio.current_time(), self.number
        if listed or now_s - self._looked_s > _LIST_AFTER_S:
            known = await self._find_newest(writes=listed)
        is_new = behind is not None and known > behind
        newest = known if is_new else await last_dense_number(known, exists)  # a LIST may be old
        before = self.number
        while newest > self.number:
            if newest not in found:
                await exists(newest)
            try:
                self._move(newest, self._decoded(newest, found.get(newest, b"")))
            except CorruptError as error:
                if await exists(newest + 1):
                    newest += 1  # a damaged record that is not the newest any more
                    continue
                others = [] if newest == 0 or (not lenient and await exists(newest - 1)) else await self._below(newest)
                if others and newest - others[0] > STRAY_GAP:
                    _log.warning("%s", self._stray(newest))
                    newest = others[0]
                    continue
                if not lenient:
                    raise
                _log.warning("%s; this process only reads, and goes on from the record before", error)
                self._move(*await self._first_readable(others))
                break
        self._looked_s = now_s
        return self.number > before

    async def _below(self, newest: int) -> list[int]:
        """The numbers of all records before `newest`, the greatest first, by LIST: a gap among them may have any size."""
        prefix = control_prefix(self.identity.lake_id)
        near = await listed_slots(self.store, prefix, after=max(-1, newest - STRAY_GAP))
        listed = near if min(near, default=newest) < newest else await listed_slots(self.store, prefix)
        return sorted((number for number in listed if number < newest), reverse=True)

    async def _first_readable(self, numbers: Iterable[int]) -> tuple[int, ControlRecord]:
        for number in numbers:
            with suppress(CorruptError):
                return number, self._decoded(number, await self._body(number) or b"")
        return -1, NOTHING_YET

    def _stray(self, number: int) -> str:
        return (
            f"{self.store.url}: {self.key(number)} is no control record, and no stepfs wrote it, for none is near that number: "
            "delete that object; until then it is passed over"
        )

    async def _find_newest(self, *, writes: bool = False) -> int:
        """The greatest record, by LIST from `hint` on. A hole is passed: the record after it was decided on it.

        A writer (`writes`) must know the newest: `OtherHistoryError` if the sequence ends before the record that is known.
        """
        prefix, known = control_prefix(self.identity.lake_id), self.number
        newest = await last_number(self.store, prefix, after=max(known, self.hint) - 1)
        if writes and newest is None and known >= 0 and await self._body(known) is None:  # a LIST may be old
            raise self._gone(known)
        if newest is None and known < self.hint - 1:
            newest = await last_number(self.store, prefix, after=known)  # another store's hint: the log was copied
        return known if newest is None else newest

    async def _check_kept(self, seen_s_max: float) -> None:
        """`OtherHistoryError` if the known record was not seen for so long, and is gone. A store that was put back to a copy that
        lacks records alone shows a reader nothing new for ever: its group would wait for steps behind checkpoints that it
        has recorded, and producers for those checkpoints. A writer would decide on a record in whose slot another one is.
        """
        is_old = self.astray is not None or trio.current_time() - self._seen_s > seen_s_max
        if self.number < 0 or not (is_old or self._former):
            return
        try:
            await (self.check_history() if is_old else self._check_former())
        except OtherHistoryError:
            raise
        except CorruptError:  # damaged since, but there
            self._former, self._seen_s = None, trio.current_time()

    async def check_history(self) -> None:
        """`OtherHistoryError`, now and in `astray`, unless the store still has the record that is known here; one GET, or one
        more if it came after a silence: then for the one before, too.
        """
        await self._check_former()
        number, record_id = self.number, self.record.record_id
        if number >= 0 and not await self._has(number, record_id):
            raise self._gone(number)
        self.astray, self._seen_s = None, trio.current_time()

    async def _check_former(self) -> None:
        former = self._former
        if former is not None and not await self._has(*former, or_none=True):
            raise self._gone(former[0])
        if self._former == former:  # another task may have moved meanwhile
            self._former = None

    async def _has(self, number: int, record_id: bytes, *, or_none: bool = False) -> bool:
        """Whether that record is there, `or_none`: an object that vanished is passed over where there are newer ones."""
        for _ in range(2):  # a store may hide an object once
            body = await self._body(number)
            if body is not None:
                return self._decoded(number, body).record_id == record_id
        return or_none

    def _gone(self, number: int) -> OtherHistoryError:
        self.astray = OtherHistoryError(
            f"{self.store.url}: another history: control record {number}, which was read here, is gone, so the store was "
            "rolled back; begin again from what it has: mount again, or restart this process"
        )
        return self.astray

    async def change(self, request: Request) -> ControlRecord:
        """Bring the lake's newest record into the requested state, and return it.

        Raises what `decide` refuses, and then nothing was written. `StoreUnreachableError` if the store does not
        answer: the change may have landed, or may land later; the next call settles that first.
        """
        async with self._changing:
            await self._settle_former()
            begun_s = trio.current_time()
            await self.refresh(listed=True)
            fenced = not request.fences
            look_s = max(_RETRY_S, trio.current_time() - begun_s)
            for attempt in range(_ROUNDS_MAX):
                number, record = self.number, self.record
                following = decide(number, record, request)
                if following is None and fenced:
                    return record
                following = following or successor(number, record)
                if await self._take(number + 1, following, frees=_held(following) < _held(record)):
                    return following
                fenced = True
                # Before the look, not behind it: a decision that waits loses its slot to a writer that does not.
                await trio.sleep(entropy.uniform(0, min(_SPREAD_S_MAX, look_s * _SPREAD ** (attempt + 1))))
                await self.refresh(listed=True, behind=number)
        raise RefusedError(f"{self.store.url}: others change the lake's groups all the time; try again")

    async def advance(self, request: Advance) -> bool:
        """Take the slot after the newest record with the advance, decided again on each newer one. False: a group needs
        more by now, or there is a newer record already: look at the groups again. One who slept before the create may have
        filled a hole, and what is deleted is gone: so it looks once more behind it.
        """
        async with self._changing:
            await self._settle_former()
            for attempt in range(_ROUNDS_MAX):
                await self.refresh(listed=True)
                following = decide(self.number, self.record, request)
                if following is None:
                    return False
                if await self._take(self.number + 1, following):
                    return not await self.refresh(listed=True)
                await trio.sleep(entropy.uniform(0, _RETRY_S * min(attempt + 1, 8)))
        return False

    async def last_readable(self) -> tuple[int, int, ControlRecord]:
        """(number of the newest record, that of the newest one that can be read, and that record)."""
        newest = await self._find_newest()
        others = await self._below(newest)
        while others and newest - others[0] > STRAY_GAP:
            newest, *others = others
        return newest, *await self._first_readable((newest, *others))

    def assume(self, number: int, record: ControlRecord) -> None:
        """Go on as if record `number`, which is damaged, were this one: to repair the sequence."""
        self.number, self.record, self._seen_s = number, record, trio.current_time()

    async def take(self, number: int, record: ControlRecord) -> bool:
        """Create record `number`, which was decided on the one before. False: another writer has that slot."""
        async with self._changing:
            return await self._take(number, record)

    async def _take(self, number: int, record: ControlRecord, *, frees: bool = True) -> bool:
        """Create record `number`. False: another writer has it. `frees`: see `encode_control`."""
        self.check_may_write()
        record = replace(record, record_id=entropy.token(RECORD_ID_BYTES), time_ms=self.clock.now_ms())
        body = encode_control(self.identity.lake_id, record, frees=frees)
        self._unanswered = number, record, body
        return await self._settle()

    async def _settle_former(self) -> None:
        """Decide a create of an earlier call, unless the record that it was decided on is gone: `OtherHistoryError`."""
        if self._unanswered is not None:
            await self._look_back()
            await self._settle()

    async def _settle(self) -> bool:
        """Take, or lose, the slot of a create that has no answer yet. False: another writer has it, or there is none."""
        if self._unanswered is None:
            return False
        number, record, body = self._unanswered
        outcome = await take_slot(self.store, self.key(number), body, self._look_back)
        if isinstance(outcome, Unknown):
            raise StoreUnreachableError(
                f"{self.store.url}: the store stopped answering{outcome.why}; the change may be on record or not: see "
                f"{command('stepfs', 'status', self.store.url)}, and try again"
            )
        self._unanswered = None
        if isinstance(outcome, Mine):
            self._move(number, record)
        return isinstance(outcome, Mine)

    async def _body(self, number: int) -> bytes | None:
        """Record `number` as stored, None if absent. One that is larger than any is as good as an empty one: damaged."""
        try:
            return await self.store.get(self.key(number), bytes_max=RECORD_BYTES_MAX)
        except CorruptError:
            return b""

    def key(self, number: int) -> str:
        return numbered(control_prefix(self.identity.lake_id), number)

    def _move(self, number: int, record: ControlRecord) -> None:
        if number > self.number:  # another task of this process may have read a newer one
            now_s = trio.current_time()
            if self.number >= 0 and self._former is None and now_s - self._seen_s > _SLOW_S:
                self._former = self.number, self.record.record_id
            self.number, self.record, self._seen_s = number, record, now_s

    def _decoded(self, number: int, body: bytes) -> ControlRecord:
        key = self.key(number)
        try:
            lake_id, record = decode_control(body, key)
        except CorruptError as error:
            raise self._damaged(str(error)) from error
        if lake_id != self.identity.lake_id:
            raise self._damaged(f"{key}: belongs to lake {lake_id}, not {self.identity.lake_id}")
        return record

    def _damaged(self, why: str) -> CorruptError:
        repair = command("stepfs", "verify", self.store.url, "--repair")
        return CorruptError(
            f"{why}. This is the lake's newest control record: nothing is reclaimed and no group changes until {repair}"
        )


def _held(record: ControlRecord) -> int:
    """How much groups put on record: themselves, and their checkpoints."""
    return sum(1 + len(group.kept) + len(group.recorded) for group in record.groups.values())


@dataclass(frozen=True, slots=True)
class Group:
    """One consumer group of one lake, by name. Each verb raises what `Control.change` raises. `on` and `of` take the name of a
    run; those of replicas and forks are made here alone.
    """

    control: Control
    name: str

    @classmethod
    def of(cls, store: Store, identity: LakeIdentity, name: str, clock: Clock | None = None) -> Group:
        """A group with a control sequence of its own. `UsageError` for a name that cannot be one."""
        return cls.on(Control(store, identity, clock or SystemClock()), name)

    @classmethod
    def on(cls, control: Control, name: str) -> Group:
        """`UsageError` for a name that cannot be one."""
        return cls(control, check_group(name))

    @property
    def known(self) -> GroupRecord | None:
        """The group in the newest record that this process knows; None if it is not there."""
        return self.control.groups.get(self.name)

    async def read(self) -> GroupRecord | None:
        """The group in the newest record; None if it was never registered, or is retired."""
        await self.control.refresh()
        return self.known

    async def register(self, fork: str = "", replica: str = "") -> GroupRecord:
        """Make the group exist; it keeps every live step until its first checkpoint. Idempotent.

        `fork`: the URL of the fork that holds it. `replica`: see `GroupRecord`; of one that is there, too.
        """
        return await self._changed(Register(self.name, fork, replica))

    async def add(self, next_step: Step, *, keep: int | None = None, creates: bool = True) -> GroupRecord:
        """Record a durable checkpoint that resumes at `next_step`. With `keep`, only the last `keep` recorded ones
        stay.

        Checkpoints beyond `next_step` do not count and stay, too (`add_to_order`). Raises `WithdrawnError` when steps
        that the checkpoint needs are reclaimed already, `NoSuchGroupError` if there is none and it `creates` none.
        """
        if keep is not None and keep < 1:
            raise UsageError(f"--keep {keep}: keep at least one checkpoint, or retire the group")
        return await self._changed(Add(self.name, next_step, keep, creates))

    async def paces(self, next_step: Step, *, creates: bool = True) -> GroupRecord:
        """Record that the run is at `next_step`: producers' `max_lead` counts from there, and nothing is held. Else as `add`."""
        name = check_id(PACE_GROUP + self.name, "group")
        return (await self.control.change(Pace(name, next_step, creates))).groups[name]

    async def resumed(self, next_step: Step, *, creates: bool = True) -> GroupRecord:
        """Record that training resumed from the checkpoint at `next_step`, and keep that checkpoint from now on.

        Nothing is dropped: a trainer can still go back to a greater checkpoint, until it has passed it with `keep`.
        Raises `WithdrawnError` when steps that the checkpoint needs are reclaimed already.
        """
        return await self._changed(Resume(self.name, next_step, creates))

    async def drop(self, next_step: Step) -> GroupRecord:
        """Stop keeping the checkpoint at `next_step`. `AbsentError` if it was not kept."""
        return await self._changed(Drop(self.name, next_step))

    async def replace(self, kept: frozenset[Step]) -> GroupRecord:
        return await self._changed(Revise(self.name, lambda _: kept))

    async def revise(
        self, change: Callable[[frozenset[Step]], frozenset[Step]], *, revives: bool = True
    ) -> GroupRecord | None:
        """Replace the kept checkpoints by `change` of them, also when other writers change them meanwhile.

        Raises `WithdrawnError` with the new checkpoints that come too late. None: the group is retired, and the call
        does not revive it.
        """
        record = await self.control.change(Revise(self.name, change, revives))
        return record.groups.get(self.name)

    async def retire(self) -> GroupRecord:
        """End the run: the group no longer keeps any step. Returns it as it was known; `AbsentError` if there is none."""
        former = self.known or GroupRecord(start=self.control.first_live_step)
        await self.control.change(Retire(self.name))
        return former

    async def _changed(self, request: Request) -> GroupRecord:
        return (await self.control.change(request)).groups[self.name]
