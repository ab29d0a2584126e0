"""Entries that can be read one by one: each carries its own checksum, and lies where a reader computes that it lies."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.descriptor import Descriptor, SliceRef, pack_slices
from stepfs.format.ids import BLOCK_BYTES, SEGMENT_STEPS, Epoch, SegmentIndex, Step, Version
from stepfs.format.keys import entries_prefix, extent, index_prefix, segment_of
from stepfs.format.snapshot import Segment, StepEntry, encode_segment
from stepfs.format.step_records import (
    Elsewhere,
    StepRecord,
    decode_step_record,
    decode_step_records,
    encode_step_records,
    place_of,
    stride_bytes,
)

LAKE_ID = "5" * 32
INDEX = SegmentIndex(3)
DIGEST = bytes(range(32))


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
    found = decode_step_record(data[place : place + stride_bytes(slices)], "entries")
    reads = 1
    if isinstance(found, Elsewhere):
        found = decode_step_record(data[found.offset : found.offset + found.size], "entries")
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
    data = encode_step_records(LAKE_ID, slices, whole)
    for entry in whole.entries[:: SEGMENT_STEPS // 8]:
        found, took = record_at(data, entry.step, slices)
        assert found == StepRecord(LAKE_ID, DIGEST[:8], entry)
        assert took == reads
    assert [record.entry for record in decode_step_records(data, slices, "entries")] == list(whole.entries)


@pytest.mark.parametrize("slices", [64, 256])
def test_an_entry_is_little_beside_its_segment(slices):
    whole = segment(slices)
    assert stride_bytes(slices) <= 24 * slices + 576
    assert stride_bytes(slices) * 400 < len(encode_segment(LAKE_ID, whole))
    assert len(encode_step_records(LAKE_ID, slices, whole)) == SEGMENT_STEPS * stride_bytes(slices)


@given(st.data())
def test_a_flipped_bit_is_found_by_the_entry_it_is_in_and_by_no_other(data):
    slices = 2
    stored = bytearray(encode_step_records(LAKE_ID, slices, _SMALL))
    step = data.draw(st.integers(0, SEGMENT_STEPS - 1))
    place = place_of(Step(step), slices)
    used = len(bytes(stored[place : place + stride_bytes(slices)]).rstrip(b"\0"))
    stored[place + data.draw(st.integers(0, used - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptError):
        record_at(bytes(stored), step, slices)
    other = (step + 1) % SEGMENT_STEPS
    assert record_at(bytes(stored), other, slices)[0].entry == _SMALL.entries[other]


_SMALL = segment(2)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_corrupt(data):
    with contextlib.suppress(CorruptError, NewerFormatError):
        decode_step_record(data, "entries")


def test_a_truncated_object_and_a_place_that_points_on_are_corrupt():
    data = encode_step_records(LAKE_ID, 2, _SMALL)
    for spoilt in (data[:-1], data + b"\0", data[:-1] + b"\1"):
        with pytest.raises(CorruptError):
            list(decode_step_records(spoilt, 2, "entries"))
    long = replace(_SMALL, entries=tuple(replace(e, producer_id="p" * 256) for e in _SMALL.entries))
    behind = encode_step_records(LAKE_ID, 2, long)
    looped = behind[: SEGMENT_STEPS * stride_bytes(2)] + behind[: stride_bytes(2)] * 2
    with pytest.raises(CorruptError):
        list(decode_step_records(looped, 2, "entries"))


def test_names_say_which_segment():
    key = extent(entries_prefix(LAKE_ID), INDEX)
    assert segment_of(entries_prefix(LAKE_ID), key) == INDEX
    assert segment_of(index_prefix(LAKE_ID), key) is None  # so readers and reclaimers before this object ignore it
    assert segment_of(entries_prefix(LAKE_ID), key + "0") is None
