"""Append to the log: which commit follows the head, and when a log pauses for writers that are locked out.

A seal or a retirement follows the head, takes the slot and checks the floor, as a producer does (producer/COMMIT.md). A
writer that is locked out asks for a pause in the control sequence. Times are seconds on the caller's monotonic clock.
"""

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import trio

from stepfs._internal import entropy
from stepfs._internal.clock import Clock
from stepfs.errors import AbsentError, CorruptError, RefusedError
from stepfs.format.codec import WRITER
from stepfs.format.commit import COMMIT_ID_BYTES, Commit, CommitKind
from stepfs.format.ids import Epoch, Version
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.snapshot import LogState
from stepfs.lake.control import Control
from stepfs.lake.create_once import SlotLost, settled, take_slot
from stepfs.lake.decisions import AskForPause
from stepfs.lake.identity import check_writable
from stepfs.lake.log.apply import rehearsed
from stepfs.lake.log.reader import LogReader

_log = logging.getLogger("stepfs.lake.log")

PAUSE_S: Final = 3.0  # an attempt, what it reads before, and the others' time to see the request
ASKS_EVERY_S: Final = 20.0  # from beginning to beginning
_GIVES_WAY_EVERY_S: Final = 18.0  # less, so that all others hear a writer that asks as soon as it may
ASKS_AFTER_S: Final = 1.0  # from the first loss; starts that race each other are done by then
SAY_AFTER_S: Final = 10.0

_GIVE_UP_S: Final = 120.0  # at least four pauses
_RETRY_S: Final = 0.02
_RETRIES_LONGER: Final = 16


class Pauses:
    """One writer's view of the log's pauses."""

    def __init__(self) -> None:
        self._asked: int | None = None  # how often writers had asked, as seen last; None: nothing seen yet
        self._begin_s = float("-inf")  # of the newest pause
        self._refused_s = float("-inf")  # when this writer could not ask

    def note(self, now_s: float, asked: int) -> None:
        """Note how often writers have asked, by the control record. What a new writer finds there is over."""
        is_new = self._asked is not None and asked > self._asked
        self._asked = asked
        if is_new and now_s >= self._begin_s + _GIVES_WAY_EVERY_S:
            self._begin_s = now_s

    def is_open(self, now_s: float) -> bool:
        """Whether the log pauses now, for writers that are locked out."""
        return self._begin_s <= now_s < self._begin_s + PAUSE_S

    def may_ask(self, now_s: float) -> bool:
        """Whether another request would be heard."""
        return now_s >= max(self._begin_s, self._refused_s) + ASKS_EVERY_S

    def kept_s(self, due_s: float) -> float:
        """`due_s`, or if the log pauses then, the end of that pause."""
        return self._begin_s + PAUSE_S if self.is_open(due_s) else due_s

    def after_s(self, from_s: float, wait_s: float) -> float:
        """The time at which `wait_s` have passed since `from_s`, the pause not counted: silent writers stay spread."""
        due_s, end_s = from_s + wait_s, self._begin_s + PAUSE_S
        if due_s < self._begin_s or from_s >= end_s:
            return due_s
        return due_s + end_s - max(from_s, self._begin_s)

    async def look(self, control: Control, losing_since_s: float) -> None:
        """See, as a writer that is locked out, whether somebody asked for a pause, and ask if it is time.

        One request, or three. Where the record cannot be written, this writer goes on as before.
        """
        assert self._asked is not None, "the head was read, and the control record with it"
        now_s = trio.current_time()
        try:
            if now_s - losing_since_s >= ASKS_AFTER_S and self.may_ask(now_s):
                await control.change(AskForPause(self._asked))
            elif not self.is_open(now_s):
                await control.refresh()
        except (RefusedError, CorruptError) as error:
            _log.warning("cannot ask the other producers for a pause: %s", error)
            self._refused_s = now_s
        self.note(trio.current_time(), control.record.pauses_asked)


@dataclass(slots=True)
class Waiting:
    """Says once that a commit waits for a gap in the log."""

    what: str  # "the seal"
    since_s: float | None = None  # the first loss
    said: bool = False

    def note_lost(self, now_s: float) -> float:
        """Note a lost attempt. Returns the seconds since the first."""
        if self.since_s is None:
            self.since_s = now_s
        waited_s = now_s - self.since_s
        if waited_s >= SAY_AFTER_S and not self.said:
            self.said = True
            _log.warning(
                "%s has waited %.0f s: producers nearer to the store commit all the time; they were asked to pause",
                self.what,
                waited_s,
            )
        return waited_s


async def seal(reader: LogReader, clock: Clock) -> bool:
    """Declare that no more steps will come; False if the lake was sealed already."""

    def make(head: LogState) -> Commit | None:
        return None if head.sealed else ownerless(head, CommitKind.SEAL, clock)

    return await _append(reader, make, "the seal")


async def retire_producer(reader: LogReader, producer_id: str, clock: Clock) -> bool:
    """Commit the epoch with which a producer retires, on behalf of a producer that will not come back.

    A process that still runs under this id is fenced; its uncommitted uploads may be deleted. A later start is allowed
    and continues its seqs. False if there was nothing to do: retired already, sealed. `AbsentError` if the lake does
    not know the id.
    """

    def make(head: LogState) -> Commit | None:
        known = head.producers.get(producer_id)
        if known is None or known.retired or head.sealed:
            return None
        return replace(
            ownerless(head, CommitKind.EPOCH, clock),
            producer_id=producer_id,
            epoch=Epoch(known.epoch + 1),
            incarnation=entropy.token(COMMIT_ID_BYTES),
            next_seq=known.next_seq,
            position=known.position,
            retired=True,
            writer=WRITER,
        )

    fresh = await _append(reader, make, f"the retirement of {producer_id!r}")
    if producer_id not in reader.state.producers:
        raise AbsentError(
            f"{reader.store.url}: no producer {producer_id!r}; `stepfs status` lists those that the lake knows"
        )
    return fresh


def ownerless(head: LogState, kind: CommitKind, clock: Clock) -> Commit:
    """A commit of no producer that follows `head` and changes no step."""
    return Commit(
        version=Version(head.version + 1),
        lake_id=head.lake_id,
        kind=kind,
        commit_id=entropy.token(COMMIT_ID_BYTES),
        prev_digest=head.digest,
        producer_id="",
        epoch=Epoch(0),
        incarnation=bytes(COMMIT_ID_BYTES),
        next_seq=0,
        position=b"",
        first_step=head.next_step,
        tgbs=(),
        time_ms=max(clock.now_ms(), head.time_ms + 1),
        total_bytes=head.total_bytes,
        total_records=head.total_records,
    )


async def _append(reader: LogReader, make: Callable[[LogState], Commit | None], what: str) -> bool:
    check_writable(reader.identity, reader.store.url)
    await reader.control.refresh()  # one that was opened to read only may have passed over a damaged record
    waiting, pauses = Waiting(f"{reader.store.url}: {what}"), Pauses()
    for attempt in itertools.count():
        now_s = trio.current_time()
        if attempt:
            waited_s = waiting.note_lost(now_s)
            if waited_s > _GIVE_UP_S:
                break
            await pauses.look(reader.control, now_s - waited_s)
        if not pauses.is_open(trio.current_time()):
            await trio.sleep(entropy.uniform(0, _RETRY_S * min(attempt, _RETRIES_LONGER)))
        await reader.precede()
        pauses.note(trio.current_time(), reader.control.record.pauses_asked)
        commit = make(reader.head)
        if commit is None:
            if await reader.confirm():
                return False
            continue  # the slot that shows it done is a reclaimed one, taken again
        commit = reader.carrying(replace(commit, control=max(reader.control.number, 0)))
        body = rehearsed(reader.head, commit)
        key = numbered(log_prefix(reader.identity.lake_id), commit.version)
        taken = await take_slot(reader.store, key, body, reader.check_history)
        outcome = settled(taken, reader.store, "run it again to see")
        if isinstance(outcome, SlotLost):
            if not outcome.taken:
                reader.mark_stale()
            continue
        reader.extend(commit, body)
        if await reader.confirm():
            return True
    raise RefusedError(
        f"{reader.store.url}: {what} lost to producers' commits for {_GIVE_UP_S:.0f} s; stop them, or try again nearer to the store"
    )
