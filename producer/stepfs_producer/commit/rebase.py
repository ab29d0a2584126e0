"""A commit on top of the head, as a pure function of the head and of what is pending; or why there can be none.

Every safety rule of a writer that can be decided without I/O is here, and only here: which producers are fenced, which
appends are already in the log, where the next steps start. The guard compares `seq`, which this protocol keeps dense, and
never `position`, which belongs to the user (hazard 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.codec import WRITER
from stepfs.format.commit import COMMIT_TGBS_MAX, Commit, CommitKind
from stepfs.format.ids import POSITION_BYTES_MAX, PRODUCERS_MAX, TOTAL_MAX, Epoch, Version
from stepfs.format.snapshot import LogState, ProducerState
from stepfs.format.tgb import Descriptor

COMMIT_DESCRIPTOR_BYTES_MAX: Final = 8 << 20  # a commit of more slices than this holds fewer TGBs

POSITIONS_BYTES_MAX: Final = 32 << 20  # of all producers together: every snapshot carries them


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One run of a producer id: its epoch in the log, and the random id that distinguishes two runs at one epoch."""

    producer_id: str
    epoch: Epoch
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class Durable:
    """A TGB that is in the store and in no commit yet."""

    tgb: Descriptor
    position: bytes  # msgpack
    payload_bytes: int
    records: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """The parts of a commit that do not follow from the head: new for every attempt."""

    commit_id: bytes
    now_ms: int
    control: int = 0  # a control record that exists


@dataclass(frozen=True, slots=True)
class FencedRefusal:
    """The log knows a newer incarnation of this producer id: stop, nothing pending may be written."""

    epoch: Epoch  # the newer one


@dataclass(frozen=True, slots=True)
class SealedRefusal:
    """The lake accepts no more steps."""


@dataclass(frozen=True, slots=True)
class NothingLeft:
    """All pending appends are in the log already; `state` is the log's state of this producer."""

    state: ProducerState


Refusal = FencedRefusal | SealedRefusal | NothingLeft


def rebase(head: LogState, pending: Sequence[Durable], me: Incarnation, stamp: Stamp) -> Commit | Refusal:
    """The next data commit: as many of `pending`, in order of seq, as one commit holds.

    `CorruptError` if the log lacks a commit that this incarnation knows: a gap in seq is never bridged. `RefusedError`
    if the totals or the position after it would exceed the lake's limits.
    """
    mine = _live_state(head, me)
    if isinstance(mine, FencedRefusal):
        return mine
    rest = [item for item in pending if item.tgb.seq >= mine.next_seq]
    if not rest:
        return NothingLeft(mine)
    if head.sealed:
        return SealedRefusal()
    _check_dense(rest, mine)
    taken = rest[: _fitting(rest)]
    total_bytes = head.total_bytes + sum(item.payload_bytes for item in taken)
    total_records = head.total_records + sum(item.records for item in taken)
    _check_totals(total_bytes, total_records)
    _check_growth(head, mine, taken[-1].position)
    return Commit(
        version=Version(head.version + 1),
        lake_id=head.lake_id,
        kind=CommitKind.DATA,
        commit_id=stamp.commit_id,
        prev_digest=head.digest,
        producer_id=me.producer_id,
        epoch=me.epoch,
        incarnation=me.incarnation,
        next_seq=taken[-1].tgb.seq + 1,
        position=taken[-1].position,
        first_step=head.next_step,
        tgbs=tuple(item.tgb for item in taken),
        time_ms=_next_time(head, stamp),
        total_bytes=total_bytes,
        total_records=total_records,
        control=stamp.control,
    )


def rebase_start(head: LogState, producer_id: str, incarnation: bytes, stamp: Stamp) -> Commit | Refusal:
    """The epoch commit of a new incarnation: the head's epoch + 1. It fences all earlier incarnations.

    The loser of two racing starts calls this again with the winner in `head`, and fences it; two are never live.
    `RefusedError` if the lake can take no more producer ids.
    """
    known = head.producers.get(producer_id)
    if known is not None and known.incarnation == incarnation and not known.retired:
        return NothingLeft(known)
    if head.sealed:
        return SealedRefusal()
    if known is None:
        _check_room(head)
    return _epoch_commit(head, producer_id, incarnation, stamp, retired=False)


def rebase_retire(head: LogState, me: Incarnation, stamp: Stamp) -> Commit | Refusal:
    """The epoch commit of a retirement: one epoch further, so that uncommitted uploads are known to be orphans."""
    known = head.producers.get(me.producer_id)
    if known is not None and known.incarnation == me.incarnation and known.retired:
        return NothingLeft(known)
    mine = _live_state(head, me)
    if isinstance(mine, FencedRefusal):
        return mine
    if head.sealed:
        return SealedRefusal()
    return _epoch_commit(head, me.producer_id, me.incarnation, stamp, retired=True)


def _check_totals(total_bytes: int, total_records: int) -> None:
    """Refuse totals that a reader could not represent: after such a commit the lake would be unreadable."""
    if max(total_bytes, total_records) > TOTAL_MAX:
        raise RefusedError(
            f"the lake is full: with this commit it would count {total_bytes} bytes and {total_records} records in all its "
            f"steps, at most {TOTAL_MAX} of each fit; `stepfs fork` it (a fork counts live steps only) or start another"
        )


def _check_growth(head: LogState, mine: ProducerState, position: bytes) -> None:
    """Positions grow after a producer has joined; a snapshot with too many bytes of them could never be written.

    Positions that stay or shrink always pass, also in a lake that is beyond the limit. The sum is computed only if it
    can matter: with up to 512 producers it cannot.
    """
    grown = len(position) - len(mine.position)
    if grown <= 0 or len(head.producers) * POSITION_BYTES_MAX <= POSITIONS_BYTES_MAX:
        return
    size = _positions_bytes(head) + grown
    if size > POSITIONS_BYTES_MAX:
        raise RefusedError(
            f"producer {mine.producer_id!r}: a position of {len(position)} bytes does not fit: those of the "
            f"{len(head.producers)} producer ids of this lake would take {size} bytes, at most {POSITIONS_BYTES_MAX} fit; "
            "start again with smaller positions (keep the state elsewhere and commit its name), or use another lake"
        )


def _positions_bytes(head: LogState) -> int:
    return sum(len(producer.position) for producer in head.producers.values())


def _check_room(head: LogState) -> None:
    size = _positions_bytes(head)
    if len(head.producers) >= PRODUCERS_MAX or size > POSITIONS_BYTES_MAX:
        raise RefusedError(
            f"the lake knows {len(head.producers)} producer ids, with {size} bytes of positions, and can take no more; "
            "use ids again, one for each place where a producer runs instead of one for each run"
        )


def _epoch_commit(head: LogState, producer_id: str, incarnation: bytes, stamp: Stamp, *, retired: bool) -> Commit:
    known = head.producers.get(producer_id)
    return Commit(
        version=Version(head.version + 1),
        lake_id=head.lake_id,
        kind=CommitKind.EPOCH,
        commit_id=stamp.commit_id,
        prev_digest=head.digest,
        producer_id=producer_id,
        epoch=Epoch(known.epoch + 1 if known else 1),
        incarnation=incarnation,
        next_seq=known.next_seq if known else 0,
        position=known.position if known else b"",
        first_step=head.next_step,
        tgbs=(),
        time_ms=_next_time(head, stamp),
        total_bytes=head.total_bytes,
        total_records=head.total_records,
        control=stamp.control,
        retired=retired,
        writer=WRITER,
    )


def _live_state(head: LogState, me: Incarnation) -> ProducerState | FencedRefusal:
    """This producer's state in `head`, or its newer incarnation."""
    known = head.producers.get(me.producer_id)
    if known is None or known.epoch < me.epoch:
        raise CorruptError(
            f"log version {head.version} knows producer {me.producer_id!r} at epoch {known.epoch if known else 0}, but "
            f"epoch {me.epoch} was committed: the store lost or rewrote the log; restore it from a backup"
        )
    if known.epoch > me.epoch or known.incarnation != me.incarnation or known.retired:
        return FencedRefusal(known.epoch)
    return known


def _check_dense(rest: Sequence[Durable], mine: ProducerState) -> None:
    for expected, item in enumerate(rest, mine.next_seq):
        if item.tgb.seq != expected:
            raise CorruptError(
                f"producer {mine.producer_id!r} holds seq {item.tgb.seq} where the log needs {expected}: the log went "
                "back behind what was committed; restore it, then restart this producer"
            )


def _fitting(rest: Sequence[Durable]) -> int:
    """The number of TGBs in one commit: at least one, bounded in number and in bytes of descriptors."""
    size = 0
    for count, item in enumerate(rest[:COMMIT_TGBS_MAX]):
        size += len(item.tgb.packed_slices) + len(item.tgb.packed_blocks)
        if count and size > COMMIT_DESCRIPTOR_BYTES_MAX:
            return count
    return min(len(rest), COMMIT_TGBS_MAX)


def _next_time(head: LogState, stamp: Stamp) -> int:
    """The commit's time: it only grows, even if the producers' clocks differ."""
    return max(stamp.now_ms, head.time_ms + 1)
