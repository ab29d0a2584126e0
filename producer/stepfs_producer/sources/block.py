"""Blocks: the address of a block in its source, the task of reading it, and its records in block order.

A source is *ordered* by blocks (8 MiB by default), *read* by fragments, and transformed by groups of records (parts of a
block); see producer/PLANNING.md. A task has no listing, so it is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from fractions import Fraction
from pickle import PickleBuffer
from typing import Final, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_PICKLE_WITH_BUFFERS: Final = 5


class BlockAddress(NamedTuple):
    """Where a block stands in the endless order of its source."""

    epoch: int
    fragment: int  # place of its first fragment in the order of the epoch
    block: int  # in that fragment; 0 unless the fragment is cut into several blocks


class Unit(Enum):
    """The fragments of a file."""

    RANGES = "byte ranges"
    PARTS = "parts, as listed"
    WHOLE = "the file, whose decoded size is unknown"
    NONE = "nothing: it belongs to another file"


class FileRef(NamedTuple):
    """A listed file, and where it lies."""

    location: str
    size: int
    etag: str
    head: str


class Fragment(NamedTuple):
    """A part of a file that is read at once."""

    file: int  # number in the listing
    ref: FileRef
    begin: int  # byte range; of a part: (0, its listed bytes)
    end: int
    part: int = -1  # number of the part in its file; -1: the byte range itself
    first_record: int = 0  # of a part: records of the file before it
    beside: FileRef | None = None  # the file beside it with the places of its records


@dataclass(frozen=True, slots=True)
class BlockTask:
    """One block to be read."""

    place: BlockAddress
    fragments: tuple[Fragment, ...]
    key: bytes  # of the order of its records
    cut: bool  # one fragment, of which this is block `place.block`; else whole fragments
    next_fragment: BlockAddress  # behind the last fragment
    epochs_end: int | None  # the first epoch that the source does not have
    share: Fraction | None  # of the epoch's records that are read; None: all


class Kind(StrEnum):
    """The content of a record."""

    TEXT = "text"  # UTF-8, still to be tokenised
    JSON = "json"  # a JSON object in UTF-8, for a transform of the user's
    FIELDS = "fields"  # the same, and as msgpack where it holds bytes: see `fields.packed`
    TOKENS = "tokens"  # little-endian int32 ids


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive records of a block. `data[ends[i - 1]:ends[i]]` is record i."""

    kind: Kind
    data: bytes | memoryview
    ends: Integers
    files: Integers  # per record: number of its file in the listing
    offsets: Integers  # per record: its first byte, or its row, in the file
    dropped: NDArray[np.bool_]  # per record: not of this run (holdout, fractional epoch)
    bad: Mapping[int, str] = field(default_factory=dict)  # record → why it cannot be decoded; it has no bytes
    mask: bytes | memoryview | None = None  # of TOKENS: one byte per token, 0 where the loss ignores it

    def __len__(self) -> int:
        return len(self.ends)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[Records], tuple[object, ...]]:
        """Protocol 5 may keep bytes beside the pickle, and map them where it is read."""
        beside = PickleBuffer if protocol.__index__() >= _PICKLE_WITH_BUFFERS else bytes
        mask = None if self.mask is None else beside(self.mask)
        fields = (self.kind, beside(self.data), self.ends, self.files, self.offsets, self.dropped)
        return Records, (*fields, self.bad, mask)

    def part(self, first: int, last: int) -> Records:
        """Records first … last - 1."""
        begin = int(self.ends[first - 1]) if first else 0
        end = int(self.ends[last - 1]) if last else 0
        tokens = slice(begin // 4, end // 4)
        return Records(
            self.kind,
            bytes(self.data[begin:end]),
            self.ends[first:last] - begin,
            self.files[first:last],
            self.offsets[first:last],
            self.dropped[first:last],
            {index - first: why for index, why in self.bad.items() if first <= index < last},
            None if self.mask is None else bytes(self.mask[tokens]),
        )


@dataclass(frozen=True, slots=True)
class Block:
    """One block as read. It may have no record."""

    place: BlockAddress
    records: Records
    follows: BlockAddress  # of the next block; of the next epoch behind an epoch's last one
    ended: bool = False  # the source has no block there: its epochs are used up
