"""The commits of one incarnation: its start, the attempts to take the next version, and its snapshots.

COMMIT.md has the order of requests and what holds between two awaits. Cancelling an attempt makes a `Committer`
unusable: its owner must start a new incarnation.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from stepfs._internal import entropy, tracing
from stepfs._internal.clock import Clock
from stepfs.errors import FencedError, OtherHistoryError, SealedError, StepfsError, StoreUnreachableError
from stepfs.format.commit import COMMIT_ID_BYTES, Commit
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Step, Version
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.snapshot import LogState, ProducerState
from stepfs.format.tgb import Descriptor
from stepfs.lake.concurrency import in_order
from stepfs.lake.create_once import Mine, SlotLost, Unknown, take_slot
from stepfs.lake.fleet import count_mounts
from stepfs.lake.identity import check_identity, check_writable, open_lake
from stepfs.lake.log.append import Waiting
from stepfs.lake.log.apply import rehearsed
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import snapshot_due, write_snapshot
from stepfs.store.api import Store
from stepfs.store.probe import probe_store
from stepfs_producer.backoff import Backoff
from stepfs_producer.commit.pace import Pacer
from stepfs_producer.commit.rebase import (
    FencedRefusal,
    Incarnation,
    NothingLeft,
    Refusal,
    SealedRefusal,
    Stamp,
    rebase,
    rebase_retire,
    rebase_start,
)
from stepfs_producer.commit.uploads import CommitWindow

_log = logging.getLogger("stepfs.producer")

_LONG_S: Final = 10.0  # what was seen longer ago is looked at once more: the store may have been rolled back

Rebase = Callable[[LogState, Stamp], Commit | Refusal]
Lost = Callable[[], Awaitable[list[Descriptor]]]
SETTLE_S_MAX: Final = 30.0
START_GIVE_UP_S: Final = 30.0  # a wrong endpoint looks like an outage and should be reported soon
HELD_LOOK_S: Final = 300.0  # between looks of a held producer at the log, six requests each
IDENTITY_CHECK_S: Final = 60.0  # while committing, a recreated lake is noticed within this time (hazard 7)
LOSSES_WORTH_SAYING: Final = 32


@dataclass(frozen=True, slots=True)
class Committed:
    """The commit is in the log permanently. `before` and `after` are the states on both sides of it."""

    commit: Commit
    before: LogState
    after: LogState


@dataclass(frozen=True, slots=True)
class CommitLost:
    """Another writer took the slot, or the floor passed it: follow, guard and try again."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """The result is unknown. The attempt is kept and must be decided before any other."""

    version: Version
    why: str  # see `stepfs.lake.create_once.Unknown`


CommitOutcome = Committed | CommitLost | Undecided | Refusal


@dataclass(frozen=True, slots=True)
class _Attempt:
    commit: Commit
    key: str
    body: bytes


class Committer:
    """The writing end of one log; used by one task."""

    def __init__(self, store: Store, reader: LogReader, clock: Clock) -> None:
        self.reader = reader
        self._followed_s = 0.0  # of the newest attempt: when its head was known
        self.exposure_s = 0.0  # from then to the create's answer (pace.py)
        self._store = store
        self._clock = clock
        self._answered_s = 0.0
        self._unresolved: _Attempt | None = None

    @property
    def head(self) -> LogState:
        return self.reader.head

    async def attempt(self, rebase: Rebase, lost: Lost | None = None, *, alone: bool = False) -> CommitOutcome:
        """Try once to commit the result of `rebase` for the head. `lost` finds uploads that are gone: `OtherHistoryError` if
        it would commit one. `alone`: as far as is known nobody else commits here.

        Alone three requests without interference: a look at the head, a create, a floor read. Raises the store's errors;
        after `StoreUnreachableError` call again, the state is consistent.
        """
        if self._unresolved is not None:
            await self._look_again(self._unresolved, lost)
            self._followed_s = trio.current_time()
            return await self._take(self._unresolved, lost)
        await self.reader.precede(alone=alone)
        gone = await lost() if lost is not None else []
        if gone:
            await self.reader.refresh()  # a successor has fenced this one, perhaps, or a create landed after all
        self._followed_s = trio.current_time()
        control = max(self.reader.control.number, 0)
        stamp = Stamp(entropy.token(COMMIT_ID_BYTES), self._clock.now_ms(), control)
        try:
            made = rebase(self.head, stamp)
            body = b""
            if isinstance(made, Commit):
                self._refuse_lost(made, gone)
                made = self.reader.carrying(made)
                body = rehearsed(self.head, made)
        except StepfsError:
            if await self.reader.confirm():  # a refusal must not rest on a resurrected slot
                raise
            return CommitLost()
        if not isinstance(made, Commit):
            return made if await self.reader.confirm() else CommitLost()
        self._unresolved = _Attempt(made, numbered(log_prefix(made.lake_id), made.version), body)
        outcome = await self._take(self._unresolved, lost)
        self.exposure_s = self._answered_s - self._followed_s
        return outcome

    async def look_for_pause(self, pacer: Pacer) -> None:
        """After a lost attempt of a writer that is locked out: see whether the log pauses, and ask for it if need be."""
        if pacer.is_locked_out:
            await pacer.pauses.look(self.reader.control, pacer.losing_since_s)

    async def _look_again(self, attempt: _Attempt, lost: Lost | None) -> None:
        """Before these bytes are sent once more: that the log has the commit before, and the store what they name."""
        if not await self.reader.check_history() or lost is None or not (gone := await lost()):
            return
        if await self._store.get(attempt.key) is None and await self.reader.confirm():  # else it landed, or is too late
            self._refuse_lost(attempt.commit, gone)

    def _refuse_lost(self, commit: Commit, gone: Sequence[Descriptor]) -> None:
        for tgb in commit.tgbs:
            if tgb in gone:
                raise OtherHistoryError(
                    f"{self._store.url}: {tgb.key} was uploaded and is gone, so the store was rolled back; restart this "
                    "process: it goes on from what the lake has"
                )

    async def _take(self, attempt: _Attempt, lost: Lost | None) -> CommitOutcome:
        slot = await take_slot(self._store, attempt.key, attempt.body, partial(self._look_again, attempt, lost))
        self._answered_s = trio.current_time()
        match slot:
            case Mine():
                return await self._settle_mine(attempt)
            case SlotLost(taken=taken):
                self._unresolved = None
                if not taken:
                    self.reader.mark_stale()
                return CommitLost()
            case Unknown(why=why):
                _log.info("the result of creating %s is unknown%s; keeping it", attempt.key, why)
                return Undecided(attempt.commit.version, why)

    async def _settle_mine(self, attempt: _Attempt) -> Committed | CommitLost:
        sound = await self.reader.confirm()
        if sound and trio.current_time() - self._followed_s > _LONG_S:
            await self.reader.check_history()  # it slept between the look and the create
        self._unresolved = None
        if not sound:
            return CommitLost()
        before = self.head
        self.reader.extend(attempt.commit, attempt.body)
        return Committed(attempt.commit, before, self.head)


class SnapshotWriter:
    """Writes at most one snapshot at a time; the newest requested state is next."""

    def __init__(self, store: Store, identity: LakeIdentity, reader: LogReader) -> None:
        self._store = store
        self._identity = identity
        self._reader = reader
        self._wanted: LogState | None = None
        self._writing = False
        self._changed = trio.lowlevel.ParkingLot()

    def note(self, committed: Committed) -> None:
        """Note one of our commits; some make the next snapshot ours to write."""
        if snapshot_due(committed.before, committed.after):
            self._wanted = committed.after
            self._changed.unpark_all()

    async def run(self) -> None:
        while True:
            while self._wanted is None:
                await self._changed.park()
            state, self._wanted, self._writing = self._wanted, None, True
            try:
                reader = self._reader
                await write_snapshot(self._store, self._identity, state, reader.segments, reader.control)
            except StepfsError as error:
                _log.warning("snapshot of version %d not written, a later one will be: %s", state.version, error)
            finally:
                self._writing = False
                self._changed.unpark_all()

    async def settled(self) -> None:
        """Wait, for a bounded time, for the snapshot under way: a producer that leaves at once would never write
        one.
        """
        with trio.move_on_after(SETTLE_S_MAX):
            while self._wanted is not None or self._writing:
                await self._changed.park()


@dataclass(frozen=True, slots=True)
class Started:
    """A live incarnation and the state from which it continues."""

    identity: LakeIdentity
    committer: Committer
    me: Incarnation
    state: ProducerState


async def start(store: Store, producer_id: str, *, clock: Clock, pacer: Pacer, backoff: Backoff) -> Started:
    """Open the lake and become the one live incarnation of `producer_id`.

    `AbsentError` if there is no lake (it is never created here), `RefusedError` if the store's conditional creates
    cannot be trusted, the lake can take no more ids or is a replica, `SealedError` if no
    more steps may come. Raced starts end with exactly one live.
    """
    identity = await backoff.run(lambda: open_lake(store))
    check_writable(identity, store.url)
    await backoff.run(lambda: probe_store(store, thorough=False))
    committer = Committer(store, await backoff.run(lambda: LogReader.open(store, identity)), clock)
    incarnation = entropy.token(COMMIT_ID_BYTES)

    def rebase(head: LogState, stamp: Stamp) -> Commit | Refusal:
        return rebase_start(head, producer_id, incarnation, stamp)

    waiting = Waiting(f"the start of producer {producer_id!r}")
    while True:
        now_s = trio.current_time()
        await trio.sleep_until(pacer.due_s(now_s=now_s, oldest_s=float("-inf"), crowded=False))
        try:
            outcome = await committer.attempt(rebase)
        except StoreUnreachableError as error:
            await backoff.failed(error)
            waiting.since_s = None  # an outage is no lock-out
            continue
        pacer.note_head(committer.head, producer_id, trio.current_time(), committer.reader.control.record.pauses_asked)
        match outcome:
            case Committed(after=after):
                state = after.producers[producer_id]
            case NothingLeft(state=known):
                state = known
            case SealedRefusal():
                raise SealedError(f"{store.url}: the lake is sealed; no more steps can be produced into it")
            case Undecided():
                await backoff.failed(unanswered(store, outcome))
                continue
            case CommitLost():
                pacer.lost(ended_s=trio.current_time(), exposure_s=committer.exposure_s)
                waiting.note_lost(trio.current_time())
                await backoff.run(lambda: committer.look_for_pause(pacer))
                continue
            case _:
                raise AssertionError(outcome)
        backoff.succeeded()
        pacer.won(started_s=trio.current_time(), exposure_s=committer.exposure_s)
        return Started(identity, committer, Incarnation(producer_id, state.epoch, incarnation), state)


def unanswered(store: Store, attempt: Undecided) -> StoreUnreachableError:
    return StoreUnreachableError(f"{store.url}: no answer to the create of log version {attempt.version}{attempt.why}")


@dataclass(slots=True)
class CommitStats:
    """The results of this incarnation's attempts; benchmarks and tests read it."""

    attempts: int = 0
    commits: int = 0
    tgbs: int = 0
    lost: int = 0
    undecided: int = 0


class CommitLoop:
    """Drives one `Committer` from one `CommitWindow`. `changed` wakes the tasks that wait for a change of either."""

    def __init__(
        self,
        store: Store,
        started: Started,
        pending: CommitWindow,
        *,
        pacer: Pacer,
        backoff: Backoff,
        snapshots: SnapshotWriter,
        changed: trio.lowlevel.ParkingLot,
        is_held: Callable[[], bool],
    ) -> None:
        """`is_held`: whether an append waits for others than this loop."""
        self.state = started.state
        self.tally = CommitStats()
        self.retiring = False
        self.retired = False
        self._store = store
        self._me = started.me
        self._identity = started.identity
        self._committer = started.committer
        self._pending = pending
        self._pacer = pacer
        self._backoff = backoff
        self._snapshots = snapshots
        self._changed = changed
        self._is_held = is_held
        self._identity_checked_s = trio.current_time()
        self._said_giving_way = False
        self._said_losing = False

    @property
    def head(self) -> LogState:
        return self._committer.head

    @property
    def first_live_step(self) -> Step:
        """The first step that is not reclaimed, as last read."""
        return self._committer.reader.control.first_live_step

    async def run(self) -> None:
        """Commit until retired. Raises `FencedError`, `SealedError`, and the error after which the back-off gives
        up.
        """
        while not self.retired:
            work = await self._due()
            try:
                await work()
            except StoreUnreachableError as error:
                await self._backoff.failed(error)

    async def _due(self) -> Callable[[], Awaitable[None]]:
        """Wait until there is a durable append and the pacer allows a commit, or until a held producer looks at the log."""
        while True:
            if self._pending.ready_tgbs:
                now_s = trio.current_time()
                due_s = self._pacer.due_s(now_s=now_s, oldest_s=self._pending.oldest_s, crowded=self._pending.crowded)
                if now_s >= due_s:
                    return self._turn
                with trio.move_on_at(due_s):
                    await self._changed.park()
            elif self.retiring and self._pending.first_seq == self._pending.certain_seq:
                return self._turn
            else:
                with trio.move_on_after(HELD_LOOK_S) as idle:
                    await self._changed.park()
                if idle.cancelled_caught and self._is_held():
                    return self._look

    async def _look(self) -> None:
        """No commit will show to a producer that is held back that it was fenced, or that the lake has ended."""
        await self._turn()
        if self.head.sealed:
            raise self._error_of(SealedRefusal())

    async def _turn(self) -> None:
        await self._check_identity()
        started_s = trio.current_time()
        self.tally.attempts += 1
        creates = self.retiring or self._pending.ready_tgbs > 0  # else no create tells of others
        outcome = await self._committer.attempt(self._rebase, self._lost, alone=creates and self._pacer.is_alone)
        exposure_s = self._committer.exposure_s
        if tracing.ring is not None:
            tracing.ring.add("commits", type(outcome).__name__, trio.current_time() - started_s, head=self.head.version)
        self._pacer.note_head(
            self.head, self._me.producer_id, trio.current_time(), self._committer.reader.control.record.pauses_asked
        )
        match outcome:
            case Committed():
                self.tally.commits += 1
                self.tally.tgbs += len(outcome.commit.tgbs)
                self._pacer.won(started_s=started_s, exposure_s=exposure_s)
                self._advance(outcome.after.producers[self._me.producer_id])
                self._snapshots.note(outcome)
            case CommitLost():
                self.tally.lost += 1
                self._pacer.lost(ended_s=trio.current_time(), exposure_s=exposure_s)
                self._say_if_losing()
                await self._committer.look_for_pause(self._pacer)
            case Undecided():
                self.tally.undecided += 1
                await self._backoff.failed(unanswered(self._store, outcome))
                return
            case NothingLeft(state=state):
                self._advance(state)
            case refusal:
                raise self._error_of(refusal)
        self._backoff.succeeded()
        self._say_if_giving_way()

    def _rebase(self, head: LogState, stamp: Stamp) -> Commit | Refusal:
        ready = self._pending.ready()
        if not ready and self.retiring:
            return rebase_retire(head, self._me, stamp)
        return rebase(head, ready, self._me, stamp)

    def _advance(self, state: ProducerState) -> None:
        """Move to the producer state of the log: by seq, not by the contents of the commit that was sent."""
        self.state = state
        self._pending.committed_below(state.next_seq)
        self.retired = state.retired
        self._changed.unpark_all()

    async def _check_identity(self) -> None:
        if trio.current_time() - self._identity_checked_s >= IDENTITY_CHECK_S:
            await check_identity(self._store, self._identity)
            self._pacer.mounts = await count_mounts(self._store, self._identity)
            self._identity_checked_s = trio.current_time()

    async def _lost(self) -> list[Descriptor]:
        """What was uploaded a while ago, or before the store was away, and is gone: it may have been rolled back since."""
        tgbs = self._pending.durable_before(max(self._backoff.outage.failed_s, trio.current_time() - _LONG_S))
        there = in_order(tgbs, lambda tgb: self._store.read_into(tgb.key, 0, memoryview(bytearray(1))))
        async with aclosing(there) as looks:
            return [tgb async for tgb, size in looks if size is None]

    def _error_of(self, outcome: CommitOutcome) -> FencedError | SealedError:
        who = f"producer {self._me.producer_id!r}"
        match outcome:
            case FencedRefusal(epoch=epoch):
                return FencedError(
                    f"{who}: epoch {epoch} has taken over from epoch {self._me.epoch}; stop this process, do not restart it"
                )
            case SealedRefusal():
                return SealedError(f"{who}: {self._store.url} is sealed; no more steps can be produced into it")
            case _:
                raise AssertionError(outcome)

    def _say_if_giving_way(self) -> None:
        if self._pacer.gives_way and self._pacer.others and not self._said_giving_way:
            self._said_giving_way = True
            _log.warning(
                "producer %r: %d others commit here and a commit takes %.3g s, so batches wait about %.3g s for theirs, longer "
                "than max_delay (%.3g s): sooner, commits would only collide; run fewer producers, or raise max_delay",
                self._me.producer_id,
                self._pacer.others,
                self._pacer.exposure_s,
                self._pacer.interval_s,
                self._pacer.delay_max_s,
            )

    def _say_if_losing(self) -> None:
        if self._pacer.losses >= LOSSES_WORTH_SAYING and not self._said_losing:
            self._said_losing = True
            _log.warning(
                "producer %r lost %d commits in a row to others: each takes %.3g s from reading the head to the store's answer, "
                "which is long beside theirs; move it nearer to the store, or run fewer producers",
                self._me.producer_id,
                self._pacer.losses,
                self._pacer.exposure_s,
            )
