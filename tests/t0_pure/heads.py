"""A head of the log, a producer, and what it has pending, for several rooms of this layer."""

from __future__ import annotations

from stepfs.format.commit import Commit, encode_commit
from stepfs.format.ids import Epoch
from stepfs.format.snapshot import LogState, genesis
from stepfs.format.tgb import Descriptor, SliceRef, pack_slices
from stepfs.lake.log.apply import apply
from stepfs_producer.commit.rebase import (
    Durable,
    Incarnation,
    Stamp,
    rebase_start,
)

LAKE = "0" * 32


ME = Incarnation("me", Epoch(1), b"m" * 16)


STAMP = Stamp(b"c" * 16, 1000)


def durable(seq: int, size: int = 7) -> Durable:
    slices, blocks = pack_slices([SliceRef(64, size, 1, 1, ())])
    return Durable(Descriptor(0, f"key-{seq}", 64 + size, seq, slices, blocks), b"%d" % seq, size, 1)


def grow(head: LogState, commit: object) -> LogState:
    assert isinstance(commit, Commit)
    return apply(head, commit, encode_commit(commit)).state


def started(head: LogState, incarnation: bytes = ME.incarnation, who: str = "me") -> LogState:
    return grow(head, rebase_start(head, who, incarnation, STAMP))


def fresh() -> LogState:
    return started(genesis(LAKE, 1))
