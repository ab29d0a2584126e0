"""Appending a commit that an operator makes, not a producer: the seal of a lake, the retirement of a lost producer.

The same loop as a producer's (producer/COMMIT.md), without data, epochs or pending work to carry over: follow, make
the next commit from the head, take the slot, check the floor; start over when another writer took the slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import trio

from stepfs import entropy
from stepfs.clock import Clock
from stepfs.errors import AbsentError, RefusedError
from stepfs.format.commit import COMMIT_ID_BYTES, Commit, CommitKind
from stepfs.format.ids import Epoch, Version
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.snapshot import LogState
from stepfs.lake.log.apply import rehearsed
from stepfs.lake.log.append import Pauses, Waiting
from stepfs.lake.log.reader import LogReader
from stepfs.lake.slots import SlotLost, settled, take_slot

_GIVE_UP_S: Final = 120.0  # at least four pauses
_RETRY_S: Final = 0.02
_RETRIES_LONGER: Final = 16


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
        await reader.refresh()
        pauses.note(trio.current_time(), reader.control.record.pauses_asked)
        commit = make(reader.head)
        if commit is None:
            if await reader.confirm():
                return False
            continue  # the slot that shows it done is a reclaimed one, taken again
        commit = replace(commit, control=max(reader.control.number, 0))
        body = rehearsed(reader.head, commit)
        key = numbered(log_prefix(reader.identity.lake_id), commit.version)
        outcome = settled(await take_slot(reader.store, key, body), reader.store, "run it again to see")
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
