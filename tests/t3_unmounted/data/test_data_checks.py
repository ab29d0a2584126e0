"""Checksums that follow the bytes as they land."""

from __future__ import annotations

import random

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from stepfs.data.blocks import Piece, Range, RangeCheck
from stepfs.data.buffers import Buffer
from stepfs.format.ids import SliceIndex

OFFSET = 640  # of the range in its object


def range_of(data, lengths, gap):
    """Pieces of these lengths with `gap` bytes between them."""
    pieces, at = [], 0
    for number, length in enumerate(lengths):
        pieces.append(Piece(SliceIndex(number), 0, OFFSET + at, length, crc32c(data[at : at + length])))
        at += length + gap
    return Range(OFFSET, at - gap, tuple(pieces))


def land(range_, data, cuts):
    """What the check says after the bytes came in runs that end at `cuts`."""
    buffer = Buffer(range_.size, range_.size)
    check, last = RangeCheck(range_, buffer), 0
    for cut in sorted({min(cut, range_.size) for cut in cuts}):
        buffer.view(last, cut)[:] = data[last:cut]
        check.update(cut)
        last = cut
    buffer.view(last, range_.size)[:] = data[last : range_.size]
    return check.problem(range_.size)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 63), st.lists(st.integers(1, 2000)), st.data()
)
def test_every_byte_of_every_piece_counts_however_they_come(lengths, gap, cuts, draw):
    data = random.Random(1).randbytes(sum(lengths) + gap * len(lengths))
    range_ = range_of(data, lengths, gap)
    assert land(range_, data, cuts) is None
    at = draw.draw(st.integers(0, range_.size - 1))
    spoilt = bytearray(data)
    spoilt[at] ^= 1
    hit = [p.index for p in range_.pieces if p.offset <= OFFSET + at < p.offset + p.length]
    found = land(range_, spoilt, cuts)
    if hit:
        assert found is not None
        assert found.startswith(f"slice {hit[0]} block 0: CRC32C ")
    else:
        assert found is None, "between slices there is nothing that anybody reads"


@pytest.mark.parametrize("got", [0, 99, 101])
def test_too_few_or_too_many_bytes_are_a_truncated_object(got):
    range_ = range_of(bytes(100), [100], 0)
    assert RangeCheck(range_, Buffer(100, 100)).problem(got) == (
        f"truncated object, {got} of 100 bytes at offset {OFFSET}"
    )
