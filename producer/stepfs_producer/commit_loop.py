"""The one task of a producer that writes the log: it commits durable appends when the pacer allows it.

One commit is in flight at a time; appends that become durable meanwhile join the next. Between two awaits:
`Pending` is shortened only here, by the log's own state (`next_seq`), so neither a commit that seemed lost nor one
whose create arrived twice can drop or double an append.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import trio

from stepfs.errors import FencedError, SealedError, StoreUnreachableError
from stepfs.format.commit import Commit
from stepfs.format.ids import Step
from stepfs.format.snapshot import LogState, ProducerState
from stepfs.lake.identity import check_identity
from stepfs.store.api import Store
from stepfs_producer.backoff import Backoff
from stepfs_producer.commit import CommitLost, CommitOutcome, Committed, Undecided
from stepfs_producer.pace import Pacer
from stepfs_producer.pending import Pending
from stepfs_producer.rebase import (
    FencedRefusal,
    NothingLeft,
    Refusal,
    SealedRefusal,
    Stamp,
    rebase,
    rebase_retire,
)
from stepfs_producer.recovery import Started, unanswered
from stepfs_producer.snapshots import SnapshotWriter

_log = logging.getLogger("stepfs.producer")

IDENTITY_CHECK_S: Final = 60.0  # while committing, a recreated lake is noticed within this time (hazard 7)
LOSSES_WORTH_SAYING: Final = 32


@dataclass(slots=True)
class CommitStats:
    """The results of this incarnation's attempts; benchmarks and tests read it."""

    attempts: int = 0
    commits: int = 0
    tgbs: int = 0
    lost: int = 0
    undecided: int = 0


class CommitLoop:
    """Drives one `Committer` from one `Pending`. `changed` wakes the tasks that wait for a change of either."""

    def __init__(
        self,
        store: Store,
        started: Started,
        pending: Pending,
        *,
        pacer: Pacer,
        backoff: Backoff,
        snapshots: SnapshotWriter,
        changed: trio.lowlevel.ParkingLot,
    ) -> None:
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
        up."""
        while not self.retired:
            await self._due()
            try:
                await self._turn()
            except StoreUnreachableError as error:
                await self._backoff.failed(error)

    async def _due(self) -> None:
        """Wait until there is a durable append and the pacer allows a commit."""
        while True:
            if self._pending.ready_tgbs:
                now_s = trio.current_time()
                due_s = self._pacer.due_s(now_s=now_s, oldest_s=self._pending.oldest_s, crowded=self._pending.crowded)
                if now_s >= due_s:
                    return
                with trio.move_on_at(due_s):
                    await self._changed.park()
            elif self.retiring and self._pending.first_seq == self._pending.certain_seq:
                return
            else:
                await self._changed.park()

    async def _turn(self) -> None:
        await self._check_identity()
        started_s = trio.current_time()
        self.tally.attempts += 1
        outcome = await self._committer.attempt(self._rebase)
        exposure_s = self._committer.exposure_s
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
            self._identity_checked_s = trio.current_time()

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
