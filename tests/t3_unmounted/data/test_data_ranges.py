"""Which GETs fetch which slices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.data.blocks import OVERREAD_MAX, RANGE_BYTES_MAX, join_pieces, pieces_of
from stepfs.format.ids import BLOCK_BYTES, SliceIndex
from stepfs.format.tgb import SliceRef, block_count

KIB = 1 << 10
MIB = 1 << 20


def plan_ranges(wanted):
    """The GETs for whole slices."""
    return join_pieces(piece for index, ref in wanted for piece in pieces_of(index, ref))


def laid_out(*sizes):
    refs = []
    offset = 64
    for number, size in enumerate(sizes):
        refs.append((SliceIndex(number), SliceRef(offset, size, 7, 1, (9,) * block_count(size))))
        offset += size + -size % 64
    return refs


def sizes_of(ranges):
    return [range_.size for range_ in ranges]


def test_one_get_per_slice_up_to_a_block():
    assert sizes_of(plan_ranges(laid_out(BLOCK_BYTES))) == [BLOCK_BYTES]
    assert sizes_of(plan_ranges(laid_out(5 * MIB, 5 * MIB))) == [5 * MIB, 5 * MIB]


def test_a_large_slice_is_one_get_per_block():
    (slice_,) = laid_out(2 * BLOCK_BYTES + 5)
    ranges = plan_ranges([slice_])
    assert sizes_of(ranges) == [BLOCK_BYTES, BLOCK_BYTES, 5]
    assert [range_.offset for range_ in ranges] == [64, 64 + BLOCK_BYTES, 64 + 2 * BLOCK_BYTES]
    assert all(len(range_.pieces) == 1 for range_ in ranges)


def test_neighbours_are_one_get_and_strangers_are_not():
    refs = laid_out(*[64 * KIB] * 16)
    assert sizes_of(plan_ranges(refs[4:8])) == [4 * 64 * KIB]
    assert len(plan_ranges([refs[0], refs[2]])) == 2
    assert len(plan_ranges([refs[1], *refs[5:9]])) == 2


def test_padding_never_parts_neighbours():
    refs = laid_out(*[65] * 100)
    assert len(plan_ranges(refs)) == 1


def test_a_small_stranger_between_large_neighbours_is_read_over():
    refs = laid_out(MIB, 10 * KIB, MIB)
    assert len(plan_ranges([refs[0], refs[2]])) == 1


def test_an_empty_slice_needs_nothing():
    assert plan_ranges(laid_out(0)) == []
    assert pieces_of(*laid_out(0)[0]) == []


@pytest.mark.parametrize("total", [8, 64, 512])
@pytest.mark.parametrize("size", [4 * KIB, 4 * KIB + 1, 70 * KIB, MIB, 3 * MIB + 9])
def test_overread_is_bounded_for_any_neighbouring_ranks(total, size):
    refs = laid_out(*[size] * total)
    for ranks in {1, 2, total // 8, total // 2, total}:
        wanted = refs[: max(1, ranks)]
        ranges = plan_ranges(wanted)
        needed = sum(ref.length for _, ref in wanted)
        assert sum(sizes_of(ranges)) <= 1.02 * needed
        per_get = max(1, BLOCK_BYTES // (size + -size % 64))
        assert len(ranges) <= -(-len(wanted) // per_get)


@given(st.lists(st.integers(4 * KIB, MIB), min_size=1, max_size=100))
def test_neighbours_up_to_a_mebibyte_need_no_more_gets_than_blocks(sizes):
    refs = laid_out(*sizes)
    assert len(plan_ranges(refs)) <= -(-sum(sizes) // BLOCK_BYTES)


@given(
    st.lists(st.integers(0, 3 * BLOCK_BYTES), min_size=1, max_size=40).flatmap(
        lambda sizes: st.tuples(st.just(sizes), st.sets(st.integers(0, len(sizes) - 1)))
    )
)
def test_every_wanted_byte_is_fetched_exactly_once(case):
    sizes, chosen = case
    refs = laid_out(*sizes)
    ranges = plan_ranges([refs[number] for number in chosen])
    pieces = [(piece.index, piece.block) for range_ in ranges for piece in range_.pieces]
    assert sorted(pieces) == sorted(
        (index, block) for index in chosen for block in range(-(-sizes[index] // BLOCK_BYTES))
    )
    assert len(set(pieces)) == len(pieces)
    end = 0
    for range_ in ranges:
        assert end <= range_.offset
        end = range_.offset + range_.size
        assert range_.size <= RANGE_BYTES_MAX
        needed = sum(piece.length for piece in range_.pieces)
        assert range_.size - needed <= max(OVERREAD_MAX * needed, 63 * (len(range_.pieces) - 1))
        assert range_.pieces[0].offset == range_.offset
        assert range_.pieces[-1].offset + range_.pieces[-1].length == end
