"""Taking the next version of the log: one attempt at a time, each ending in a value.

    unresolved?  the same bytes to the same slot again, before anything else (hazard 5)
    follow       the head, read until a probe misses
    rebase       the commit on top of it (pure, rebase.py), decoded as by a reader (stepfs.lake.log.apply)
    create       log/<head+1>, exactly once; reading the slot resolves an ambiguous result (stepfs.lake.slots)
    floor        after every branch with our slot: it is Committed only if the floor has not passed it (hazard 1)

Between two awaits: `_unresolved` is set before the first byte of a create is sent and cleared only by an
answer that decides it, so the next attempt first finishes one that an unreachable store interrupted. The reader's
head is extended by our own commit only after the floor check, so a head never rests on a lost slot of ours.

Cancelling an attempt makes this object unusable: its owner must start a new incarnation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import trio

from stepfs import entropy
from stepfs.clock import Clock
from stepfs.errors import StepfsError
from stepfs.format.commit import COMMIT_ID_BYTES, Commit
from stepfs.format.ids import Version
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.snapshot import LogState
from stepfs.lake.log.apply import rehearsed
from stepfs.lake.log.reader import LogReader
from stepfs.lake.slots import Mine, SlotLost, Unknown, take_slot
from stepfs.store.api import Store
from stepfs_producer.pace import Pacer
from stepfs_producer.rebase import Refusal, Stamp

_log = logging.getLogger("stepfs.producer")


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
    why: str  # see `stepfs.lake.slots.Unknown`


CommitOutcome = Committed | CommitLost | Undecided | Refusal
Rebase = Callable[[LogState, Stamp], Commit | Refusal]


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

    async def attempt(self, rebase: Rebase) -> CommitOutcome:
        """Try once to commit the result of `rebase` for the head.

        Three requests without interference: a probe, a create, a floor read. Raises the store's errors; after
        `StoreUnreachableError` call again, the state is consistent.
        """
        if self._unresolved is not None:
            return await self._take(self._unresolved)
        await self.reader.refresh()
        self._followed_s = trio.current_time()
        control = max(self.reader.control.number, 0)
        stamp = Stamp(entropy.token(COMMIT_ID_BYTES), self._clock.now_ms(), control)
        try:
            made = rebase(self.head, stamp)
            body = rehearsed(self.head, made) if isinstance(made, Commit) else b""
        except StepfsError:
            if await self.reader.confirm():  # a refusal must not rest on a resurrected slot
                raise
            return CommitLost()
        if not isinstance(made, Commit):
            return made if await self.reader.confirm() else CommitLost()
        self._unresolved = _Attempt(made, numbered(log_prefix(made.lake_id), made.version), body)
        outcome = await self._take(self._unresolved)
        self.exposure_s = self._answered_s - self._followed_s
        return outcome

    async def look_for_pause(self, pacer: Pacer) -> None:
        """After a lost attempt of a writer that is locked out: see whether the log pauses, and ask for it if need be."""
        if pacer.is_locked_out:
            await pacer.pauses.look(self.reader.control, pacer.losing_since_s)

    async def _take(self, attempt: _Attempt) -> CommitOutcome:
        slot = await take_slot(self._store, attempt.key, attempt.body)
        self._answered_s = trio.current_time()
        match slot:
            case Mine():
                return await self._settle_mine(attempt)
            case SlotLost(taken=taken):
                self._unresolved = None
                if not taken:
                    self.reader.doubt()
                return CommitLost()
            case Unknown(why=why):
                _log.info("the result of creating %s is unknown%s; keeping it", attempt.key, why)
                return Undecided(attempt.commit.version, why)

    async def _settle_mine(self, attempt: _Attempt) -> Committed | CommitLost:
        sound = await self.reader.confirm()
        self._unresolved = None
        if not sound:
            return CommitLost()
        before = self.head
        self.reader.extend(attempt.commit, attempt.body)
        return Committed(attempt.commit, before, self.head)
