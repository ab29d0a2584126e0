"""Entries that can be read one by one: each carries its own checksum, and lies where a reader computes that it lies."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.ids import BLOCK_BYTES, SEGMENT_STEPS, Epoch, SegmentIndex, Step, Version
from stepfs.format.keys import extent, index_prefix, segment_of
from stepfs.format.snapshot import (
    OverflowPointer,
    Segment,
    StepEntry,
    StepRecord,
    decode_segment,
    decode_step_record,
    encode_segment,
    place_of,
    stride_bytes,
)
from stepfs.format.tgb import Descriptor, SliceRef, pack_slices

LAKE_ID = "5" * 32
INDEX = SegmentIndex(3)
DIGEST = bytes(range(8))


def segment(slices, *, length=65536, producer="tok-0"):
    blocks = tuple(range(-(-length // BLOCK_BYTES))) if length > BLOCK_BYTES else ()
    refs = [SliceRef(64 + number * length, length, 7 * number, 3, blocks) for number in range(slices)]
    packed, packed_blocks = pack_slices(refs)
    size = 64 + slices * length
    entries = tuple(
        StepEntry(
            Step(step),
            Version(step),
            1_700_000_000_000 + step,
            producer,
            Epoch(1),
            Descriptor(0, f"{LAKE_ID}/data/{'a' * 32}/{step:045d}.tgb", size, step, packed, packed_blocks),
        )
        for step in range(INDEX * SEGMENT_STEPS, (INDEX + 1) * SEGMENT_STEPS)
    )
    return Segment(INDEX, DIGEST, entries)


def record_at(data, step, slices):
    place = place_of(step, slices)
    found = decode_step_record(data[place : place + stride_bytes(slices)], "index")
    reads = 1
    if isinstance(found, OverflowPointer):
        found = decode_step_record(data[found.offset : found.offset + found.size], "index")
        reads = 2
    return found, reads


@pytest.mark.parametrize(
    ("slices", "options", "reads"), [
        (1, {}, 1), (64, {}, 1), (256, {}, 1), (8, {"producer": "p" * 256}, 2),
        (64, {"length": 5 * BLOCK_BYTES + 1}, 2),
    ],
)  # fmt: skip
def test_every_entry_is_read_alone_and_is_what_the_segment_says(slices, options, reads):
    whole = segment(slices, **options)
    data = encode_segment(LAKE_ID, slices, whole)
    for entry in whole.entries[:: SEGMENT_STEPS // 8]:
        found, took = record_at(data, entry.step, slices)
        assert found == StepRecord(LAKE_ID, DIGEST, entry)
        assert took == reads
    assert decode_segment(data, slices, "index") == (LAKE_ID, whole)


@pytest.mark.parametrize("slices", [64, 256])
def test_an_entry_is_little_beside_its_segment(slices):
    whole = segment(slices)
    assert stride_bytes(slices) <= 24 * slices + 576
    assert len(encode_segment(LAKE_ID, slices, whole)) == SEGMENT_STEPS * stride_bytes(slices)


@given(st.data())
def test_a_flipped_bit_is_found_by_the_entry_it_is_in_and_by_no_other(data):
    slices = 2
    stored = bytearray(encode_segment(LAKE_ID, slices, _SMALL))
    step = data.draw(st.integers(0, SEGMENT_STEPS - 1))
    place = place_of(Step(step), slices)
    used = len(bytes(stored[place : place + stride_bytes(slices)]).rstrip(b"\0"))
    stored[place + data.draw(st.integers(0, used - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptError):
        record_at(bytes(stored), step, slices)
    with pytest.raises(CorruptError):
        decode_segment(bytes(stored), slices, "index")
    other = (step + 1) % SEGMENT_STEPS
    assert record_at(bytes(stored), other, slices)[0].entry == _SMALL.entries[other]


_SMALL = segment(2)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_corrupt(data):
    with contextlib.suppress(CorruptError, NewerFormatError):
        decode_step_record(data, "index")


def test_a_truncated_object_and_a_place_that_points_on_are_corrupt():
    data = encode_segment(LAKE_ID, 2, _SMALL)
    for spoilt in (data[:-1], data + b"\0", data[:-1] + b"\1"):
        with pytest.raises(CorruptError):
            decode_segment(spoilt, 2, "index")
    long = replace(_SMALL, entries=tuple(replace(e, producer_id="p" * 256) for e in _SMALL.entries))
    behind = encode_segment(LAKE_ID, 2, long)
    looped = behind[: SEGMENT_STEPS * stride_bytes(2)] + behind[: stride_bytes(2)] * 2
    with pytest.raises(CorruptError):
        decode_segment(looped, 2, "index")


def test_entries_of_several_lakes_histories_or_places_are_no_segment():
    stride = stride_bytes(2)
    data = encode_segment(LAKE_ID, 2, _SMALL)
    lake, history = encode_segment("6" * 32, 2, _SMALL), encode_segment(LAKE_ID, 2, replace(_SMALL, digest=bytes(8)))
    for mixed in (
        lake[:stride] + data[stride:],
        data[:-stride] + history[-stride:],
        data[stride : 2 * stride] + data[:stride] + data[2 * stride :],
        data[stride:] + data[:stride],
        data[:-1] + b"\1",
    ):
        with pytest.raises(CorruptError):
            decode_segment(mixed, 2, "index")


def test_names_say_which_segment():
    key = extent(index_prefix(LAKE_ID), INDEX)
    assert segment_of(index_prefix(LAKE_ID), key) == INDEX
    assert segment_of(index_prefix(LAKE_ID), key + "0") is None
