"""Which records of a source a run takes: its shard, its side of the holdout, and its part of a fractional last epoch.

Holdout and shard are decided by hashes of the record's bytes: duplicates are on one side, and the records of a file do not
move when another file comes or goes. The key of an epoch has the record's place (seed, epoch, source, file, offset).
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from typing import Final

from stepfs_producer.plan.order import KEY_BYTES, record_key
from stepfs_producer.sources.block import BlockTask
from stepfs_producer.sources.fields import Raw, Tokens
from stepfs_producer.sources.spec import SourceSpec

_HOLDOUT: Final = b"stepfs-holdout1\0"  # 16 bytes, as blake2b wants a `person`
_SHARD: Final = b"stepfs-shard---1"


def is_in_epoch(spec: SourceSpec, task: BlockTask, raw: Raw) -> bool:
    """Whether a fractional last epoch keeps the record: its own key is below the fraction."""
    share = task.share or Fraction(1)
    key = int.from_bytes(record_key(spec.seed, task.place.epoch, spec.name, raw.file, raw.offset), "little")
    return key * share.denominator < share.numerator << (8 * KEY_BYTES)


def is_of_this_run(spec: SourceSpec, value: bytes | Tokens) -> bool:
    """Whether a record is on this run's side of the holdout, and in its shard."""
    if spec.holdout and is_held_out(value, spec.holdout) != spec.held_out:
        return False
    index, count = spec.shard
    return count == 1 or _hash(value, _SHARD) % count == index


def is_held_out(value: bytes | Tokens, share: Fraction) -> bool:
    """Whether a record is on the side of the holdout, in any epoch and place."""
    return _hash(value, _HOLDOUT) * share.denominator < share.numerator << 64


def _hash(value: bytes | Tokens, purpose: bytes) -> int:
    """Of the record's bytes: 64 bits, others for each purpose."""
    data = value.ids if isinstance(value, Tokens) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=purpose).digest(), "little")
