"""Commits read from the tail of the log, and the state that each makes of the one before.

Writers check the rules before they write (producer/COMMIT.md). Readers check the same rules again here, so a bad
commit of a broken writer stops every reader at one version, and readers never diverge silently.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.commit import Commit, CommitKind, chain_digest, decode_commit, encode_commit
from stepfs.format.ids import SEGMENT_STEPS, Epoch, Step, Version
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.snapshot import SEGMENT_DIGEST_BYTES, LogState, ProducerState, Segment, StepEntry, pack_ref
from stepfs.lake.concurrency import in_order
from stepfs.lake.create_once import listed_slots
from stepfs.store.api import Store


async def list_versions(
    store: Store, lake_id: str, first: Version, limit: int | None = None
) -> tuple[list[Version], Version | None]:
    """The versions from `first` up to the first gap, as LIST shows them; and the first version behind a gap, if any. `limit`:
    of all that are listed.

    A gap may come from a LIST that lags, from a reclaim that is still deleting, or from a lost object.
    """
    versions: list[Version] = []
    for number in await listed_slots(store, log_prefix(lake_id), after=first - 1, limit=limit):
        if number != first + len(versions):
            return versions, Version(number)
        versions.append(Version(number))
    return versions, None


async def read_commit(store: Store, lake_id: str, version: Version) -> tuple[Commit, bytes] | None:
    """A commit and its stored bytes; None if there is none, or none any more."""
    key = numbered(log_prefix(lake_id), version)
    body = await store.get(key)
    return None if body is None else (decode_commit(body, key), body)


async def read_versions(
    store: Store, lake_id: str, versions: Sequence[Version]
) -> AsyncGenerator[tuple[str, bytes], None]:
    """(key, body) of each version in order; stops early at one that has been deleted since it was listed."""
    prefix = log_prefix(lake_id)
    keys = (numbered(prefix, version) for version in versions)
    async with aclosing(in_order(keys, store.get)) as bodies:
        async for key, body in bodies:
            if body is None:
                return
            yield key, body


class ChainError(CorruptError):
    """The commit does not continue this history. Probe the floor first: the slot may hold a stale writer's commit."""


@dataclass(frozen=True, slots=True)
class LogDamage:
    """The first version that cannot be followed, and why."""

    version: Version
    why: str


@dataclass(frozen=True, slots=True)
class Applied:
    """The next state, and the segments that filled up on the way (usually none)."""

    state: LogState
    segments: tuple[Segment, ...]


def apply(state: LogState, commit: Commit, body: bytes) -> Applied:
    """State at version v-1 and commit v → state at v. `body` is the commit's stored bytes (for the digest)."""
    _check_chain(state, commit)
    producer = _check_producer(state, commit)
    digest = chain_digest(state.digest, body)
    producers = state.producers
    if producer is not None:
        producers = {**state.producers, producer.producer_id: producer}
    tail = state.tail + tuple(
        StepEntry(
            Step(commit.first_step + number), commit.version, commit.time_ms, commit.producer_id, commit.epoch, tgb
        )
        for number, tgb in enumerate(commit.tgbs)
    )
    grown = replace(
        state,
        version=commit.version,
        digest=digest,
        next_step=commit.next_step,
        time_ms=commit.time_ms,
        total_bytes=commit.total_bytes,
        total_records=commit.total_records,
        control=max(state.control, commit.control),
        sealed=state.sealed or commit.kind is CommitKind.SEAL,
        producers=producers,
        origins=(*state.origins, commit.origin) if commit.origin is not None else state.origins,
        tail=tail,
    )
    return _seal_segments(grown)


def rehearsed(head: LogState, commit: Commit) -> bytes:
    """The bytes of `log/<version>`; `RefusedError`, and nothing is written, if readers would stop at them.

    Readers are strict and a log slot is permanent, so one commit that they refuse ends a lake. Every commit of every
    writer passes this check; encoders of all other objects decode their own result (`codec.readable`).
    """
    body = encode_commit(commit)
    try:
        apply(head, commit, body)
    except CorruptError as error:
        raise RefusedError(f"a commit that no reader would accept is not written: {error}; report this") from error
    return body


def _seal_segments(state: LogState) -> Applied:
    segments = []
    while len(state.tail) >= SEGMENT_STEPS:
        segment = Segment(state.sealed_segments, state.digest[:SEGMENT_DIGEST_BYTES], state.tail[:SEGMENT_STEPS])
        segments.append(segment)
        state = replace(state, segment_refs=state.segment_refs + pack_ref(segment), tail=state.tail[SEGMENT_STEPS:])
    return Applied(state, tuple(segments))


def _check_chain(state: LogState, commit: Commit) -> None:
    what = f"log version {commit.version}"
    if commit.lake_id != state.lake_id:
        raise ChainError(f"{what} belongs to lake {commit.lake_id}, not {state.lake_id}")
    if commit.version != state.version + 1 or commit.prev_digest != state.digest:
        raise ChainError(f"{what} does not continue version {state.version} of this lake")
    if state.sealed:
        raise ChainError(f"{what} follows a seal")
    if commit.first_step != state.next_step or commit.time_ms < state.time_ms:
        raise ChainError(f"{what} starts at step {commit.first_step}, expected {state.next_step}")
    expected_bytes = state.total_bytes + sum(tgb.payload_bytes for tgb in commit.tgbs)
    expected_records = state.total_records + sum(tgb.records for tgb in commit.tgbs)
    if (commit.total_bytes, commit.total_records) != (expected_bytes, expected_records):
        raise ChainError(f"{what}: running totals do not balance")
    for tgb in commit.tgbs:
        if tgb.slices != state.slices:
            raise ChainError(f"{what}: a TGB of {tgb.slices} slices in a lake of {state.slices}")
        if tgb.origin > len(state.origins):
            raise ChainError(f"{what}: a TGB of unknown origin {tgb.origin}")


def _check_producer(state: LogState, commit: Commit) -> ProducerState | None:
    """The committing producer's next state; None for kinds that belong to no producer."""
    if commit.kind in {CommitKind.SEAL, CommitKind.ORIGIN}:
        return None
    what = f"log version {commit.version} of producer {commit.producer_id!r}"
    known = state.producers.get(commit.producer_id)
    epoch, next_seq = (known.epoch, known.next_seq) if known else (Epoch(0), 0)
    if commit.kind is CommitKind.EPOCH:
        if commit.epoch != epoch + 1 or commit.next_seq != next_seq:
            raise ChainError(f"{what}: epoch {commit.epoch} after {epoch}")
    elif known is None or known.retired or (commit.epoch, commit.incarnation) != (epoch, known.incarnation):
        raise ChainError(f"{what}: epoch {commit.epoch} is not the live incarnation")
    seqs = [tgb.seq for tgb in commit.tgbs]
    if seqs != list(range(next_seq, next_seq + len(seqs))) or commit.next_seq != next_seq + len(seqs):
        raise ChainError(f"{what}: seq {seqs[:3]}… does not continue {next_seq}")
    later, writer = (known.later, known.writer) if known else ((), "")
    return replace(producer_after(commit), later=later, writer=commit.writer or writer)


def producer_after(commit: Commit) -> ProducerState:
    """The state of the producer that made this commit of data or of an epoch."""
    return ProducerState(
        producer_id=commit.producer_id,
        epoch=commit.epoch,
        incarnation=commit.incarnation,
        next_seq=commit.next_seq,
        position=commit.position,
        retired=commit.retired,
        version=commit.version,
        time_ms=commit.time_ms,
    )
