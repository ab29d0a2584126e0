"""The task of reading one block, without the listing: small and picklable."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import NamedTuple

from stepfs_producer.sources.block import BlockAddress


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
