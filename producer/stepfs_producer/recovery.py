"""Starting an incarnation: everything that a restarted producer needs is in the head of the log.

Position and next_seq are in the same create as the TGBs they describe, so no second copy can disagree (hazard 6: state
kept beside the log, or expired from it, made other systems duplicate data). The epoch commit comes before the position
is returned: from then on no older incarnation can move it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import trio

from stepfs import entropy
from stepfs.clock import Clock
from stepfs.errors import SealedError, StoreUnreachableError
from stepfs.format.commit import COMMIT_ID_BYTES, Commit
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import LogState, ProducerState
from stepfs.lake.identity import open_lake
from stepfs.lake.log.pause import Waiting
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Store
from stepfs.store.probe import probe_store
from stepfs_producer.backoff import Backoff
from stepfs_producer.commit import CommitLost, Committed, Committer, Undecided
from stepfs_producer.pace import Pacer
from stepfs_producer.rebase import Incarnation, NothingLeft, Refusal, SealedRefusal, Stamp, rebase_start

START_GIVE_UP_S: Final = 30.0  # a wrong endpoint looks like an outage and should be reported soon


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
    cannot be trusted or the lake can take no more ids, `SealedError` if no more steps may
    come. Raced starts end with exactly one live.
    """
    identity = await backoff.run(lambda: open_lake(store))
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
