"""Which GETs fetch which slices: pure, and the place where "bytes fetched ≤ 1.02 × bytes needed" is decided.

One GET for a slice of at most `BLOCK_BYTES`; one for a run of adjacent small slices that are wanted together; one
per checksummed block of a larger slice, so that each can be verified and served alone. A run of small slices is cut
where `BLOCK_BYTES` are reached, not before they are exceeded: so it needs no more than ⌈bytes / BLOCK_BYTES⌉ GETs.
Rejected: joining all near slices (gcsfuse and s3fs style read-ahead windows): on a node that reads 8 of 512 slices
most of the fetched bytes would never be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stepfs.format.ids import BLOCK_BYTES, SliceIndex
from stepfs.format.tgb import ALIGNMENT_BYTES, SliceRef

RANGE_BYTES_MAX: Final = BLOCK_BYTES + BLOCK_BYTES // 8
OVERREAD_MAX: Final = 0.02  # share of unwanted bytes tolerated inside one joined GET


@dataclass(frozen=True, slots=True)
class Piece:
    """The smallest verifiable run of bytes: a whole small slice, or one block of a large one."""

    index: SliceIndex
    block: int  # number of the block inside its slice, 0 for a small slice
    offset: int  # in the object
    length: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Range:
    """One ranged GET: bytes [offset, offset + size) of an object, and the blocks to verify in them."""

    offset: int
    size: int
    pieces: tuple[Piece, ...]


def pieces_of(index: SliceIndex, ref: SliceRef) -> list[Piece]:
    """A slice as verifiable pieces, in order; none for an empty slice."""
    if not ref.blocks:
        return [Piece(index, 0, ref.offset, ref.length, ref.crc32c)] if ref.length else []
    return [
        Piece(
            index,
            number,
            ref.offset + number * BLOCK_BYTES,
            min(BLOCK_BYTES, ref.length - number * BLOCK_BYTES),
            crc,
        )
        for number, crc in enumerate(ref.blocks)
    ]


def join_pieces(wanted: Iterable[Piece]) -> list[Range]:
    """Pieces of one object that are wanted together → the GETs that fetch them, by offset."""
    pieces = sorted(wanted, key=lambda piece: piece.offset)
    ranges: list[Range] = []
    run: list[Piece] = []
    needed = 0  # bytes of `run`
    for piece in pieces:
        if run and not _joins(run[0], run[-1], needed, piece):
            ranges.append(_range(run))
            run, needed = [], 0
        run.append(piece)
        needed += piece.length
    if run:
        ranges.append(_range(run))
    return ranges


def _joins(first: Piece, last: Piece, needed: int, piece: Piece) -> bool:
    gap = piece.offset - (last.offset + last.length)
    size = piece.offset + piece.length - first.offset
    if needed >= BLOCK_BYTES or size > RANGE_BYTES_MAX or gap < 0:
        return False
    return gap < ALIGNMENT_BYTES or size - needed - piece.length <= OVERREAD_MAX * (needed + piece.length)


def _range(run: list[Piece]) -> Range:
    size = run[-1].offset + run[-1].length - run[0].offset
    assert 0 < size <= RANGE_BYTES_MAX
    return Range(run[0].offset, size, tuple(run))
