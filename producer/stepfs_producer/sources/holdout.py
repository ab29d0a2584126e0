"""Which records a run leaves out: those held out for validation, by a hash of their content, and those of other shards."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from typing import Final

from stepfs_producer.sources.record import SourceSpec, Tokens

_HOLDOUT: Final = b"stepfs-holdout1\0"  # 16 bytes, as blake2b wants a `person`
_SHARD: Final = b"stepfs-shard---1"


def is_of_this_run(spec: SourceSpec, value: bytes | Tokens) -> bool:
    """Whether a record is on this run's side of the holdout, and in its shard."""
    source = spec.source
    if source.holdout and is_held_out(value, source.holdout) != spec.held_out:
        return False
    index, count = source.dealt
    return count == 1 or _hash(value, _SHARD) % count == index


def is_held_out(value: bytes | Tokens, share: Fraction) -> bool:
    """Whether a record is on the side of the holdout, in any epoch and place."""
    return _hash(value, _HOLDOUT) * share.denominator < share.numerator << 64


def _hash(value: bytes | Tokens, purpose: bytes) -> int:
    """A hash of 64 bits of the record's bytes, another one for each purpose."""
    data = value.ids if isinstance(value, Tokens) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=purpose).digest(), "little")
