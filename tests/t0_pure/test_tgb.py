"""The bytes of a TGB and of a segment: they read back, and damage is named."""

from __future__ import annotations

import contextlib
import random
import struct
from dataclasses import replace
from itertools import pairwise

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from t0_pure.strategies import payload_lists

from stepfs.errors import CorruptError, NewerFormatError, StepfsError
from stepfs.format import tgb
from stepfs.format.identity import HEAD_BYTES
from stepfs.format.ids import BLOCK_BYTES, SEGMENT_STEPS, Epoch, SegmentIndex, SliceIndex, Step, Version
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
from stepfs.lake.verify.data import TgbCheck


def image_of(payloads: list[bytes]) -> tgb.TgbImage:
    return tgb.build(
        lake_id="0" * 32, producer_id="p", epoch=Epoch(3), seq=7, payloads=payloads, records=[1] * len(payloads),
    )  # fmt: skip


def descriptor_of(image: tgb.TgbImage) -> Descriptor:
    return Descriptor(0, "key", image.size, 7, image.packed_slices, image.packed_blocks)


@given(payload_lists)
def test_every_slice_lies_aligned_where_its_descriptor_says(payloads: list[bytes]) -> None:
    image = image_of(payloads)
    data = b"".join(bytes(part) for part in image.parts)
    assert (len(data), crc32c(data)) == (image.size, image.crc32c)
    found = descriptor_of(image)
    assert found.slices == len(payloads)
    for number, payload in enumerate(payloads):
        ref = found.slice(SliceIndex(number))
        assert ref.offset % tgb.ALIGNMENT_BYTES == 0
        assert data[ref.offset : ref.offset + ref.length] == payload
        assert ref.crc32c == crc32c(payload)
        assert found.length(SliceIndex(number)) == len(payload)
    assert found.payload_bytes == sum(map(len, payloads))
    assert found.records == len(payloads)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_a_checksum_is_joined_from_those_of_the_parts(first: bytes, second: bytes) -> None:
    assert tgb.joined(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


def test_large_slices_are_checksummed_in_one_pass() -> None:
    sizes = 2 * BLOCK_BYTES + 77, 3 << 20, tgb._AGAIN_BYTES_MAX, 1
    payloads = [random.Random(size).randbytes(size) for size in sizes]
    image = image_of(payloads)
    assert crc32c(b"".join(bytes(part) for part in image.parts)) == image.crc32c
    assert [descriptor_of(image).slice(SliceIndex(number)).crc32c for number in range(4)] == [
        crc32c(payload) for payload in payloads
    ]


@given(payload_lists)
def test_the_object_reads_without_a_log(payloads: list[bytes]) -> None:
    image = image_of(payloads)
    data = b"".join(bytes(part) for part in image.parts)
    tgb.read_header(data[: tgb.ALIGNMENT_BYTES], "x")
    offset, length = tgb.read_footer(data[-tgb.FOOTER_BYTES :], size=len(data), what="x")
    index = tgb.read_index(data[offset : offset + length], size=len(data), what="x")
    assert (index.producer_id, index.epoch, index.seq) == ("p", 3, 7)
    assert (index.packed_slices, index.packed_blocks) == (image.packed_slices, image.packed_blocks)


def test_every_flipped_bit_of_the_magic_and_version_is_damage() -> None:
    for bit in range(8 * 12):
        header = bytearray(tgb.HEADER)
        header[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            tgb.read_header(bytes(header), "x")


def test_a_later_format_asks_for_an_upgrade() -> None:
    header = (b"stepfs-tgb\n" + bytes([2])).ljust(tgb.ALIGNMENT_BYTES - 4, b"\0")
    with pytest.raises(NewerFormatError, match="TGB of format 2; upgrade stepfs"):
        tgb.read_header(header + struct.pack("<I", crc32c(header)), "x")


def test_payloads_are_not_copied() -> None:
    payload = bytearray(b"x" * 1000)
    image = image_of([payload])  # type: ignore[list-item]
    view = image.parts[1]
    assert isinstance(view, memoryview)
    assert view.obj is payload


def test_a_slice_of_several_blocks_carries_a_checksum_for_each() -> None:
    small, large = b"s" * 10, bytes(BLOCK_BYTES) + b"tail"
    found = descriptor_of(image_of([small, large, small, large]))
    assert found.slice(SliceIndex(0)).blocks == ()
    for number in (1, 3):
        ref = found.slice(SliceIndex(number))
        assert ref.blocks == (crc32c(large[:BLOCK_BYTES]), crc32c(b"tail"))
        assert ref.crc32c == crc32c(large)
    with pytest.raises(IndexError):
        found.slice(SliceIndex(4))


@given(payload_lists, st.data())
def test_a_damaged_footer_or_index_is_told_apart_from_a_good_one(payloads, data: st.DataObject):
    image = image_of(payloads)
    whole = bytearray(b"".join(bytes(part) for part in image.parts))
    offset, _ = tgb.read_footer(bytes(whole[-tgb.FOOTER_BYTES :]), size=len(whole), what="x")
    place = data.draw(st.integers(offset, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StepfsError):
        read_all(bytes(whole), len(whole))


@given(payload_lists, st.integers(1, 200))
def test_a_truncated_object_is_corrupt(payloads: list[bytes], missing: int) -> None:
    whole = b"".join(bytes(part) for part in image_of(payloads).parts)
    with pytest.raises(CorruptError):
        read_all(whole[:-missing], len(whole) - missing)


def read_all(data: bytes, size: int) -> tgb.TgbIndex:
    tgb.read_header(data[: tgb.ALIGNMENT_BYTES], "x")
    offset, length = tgb.read_footer(data[-tgb.FOOTER_BYTES :], size=size, what="x")
    return tgb.read_index(data[offset : offset + length], size=size, what="x")


def built(payloads: list[bytes], seq: int = 4) -> tuple[bytes, Descriptor]:
    image = tgb.build(
        lake_id="a" * 32, producer_id="p", epoch=Epoch(1), seq=seq, payloads=payloads, records=[1] * len(payloads),
    )  # fmt: skip
    data = b"".join(image.parts)
    return data, Descriptor(0, "k", image.size, seq, image.packed_slices, image.packed_blocks)


def check(data: bytes, descriptor: Descriptor, cuts: list[int] | None = None) -> list[tuple[int | None, str]]:
    checker = TgbCheck(descriptor)
    ends = [0, *sorted(cut % (len(data) + 1) for cut in cuts or []), len(data)]
    for start, end in pairwise(ends):
        checker.feed(memoryview(data)[start:end])
    return checker.finish()


LARGE = b"PK\x03\x04" + bytes(4_000_000)
PAYLOADS = st.lists(st.binary(max_size=300), min_size=1, max_size=6)
CUTS = st.lists(st.integers(0, 10_000), max_size=8)


@given(PAYLOADS, CUTS)
def test_an_intact_object_passes_however_it_is_cut(payloads, cuts):
    data, descriptor = built(payloads)
    assert check(data, descriptor, cuts) == []


@given(PAYLOADS, CUTS, st.data())
def test_a_changed_byte_is_found_and_blamed_on_its_slice(payloads, cuts, draw):
    data, descriptor = built(payloads)
    at = draw.draw(st.integers(0, len(data) - 1))
    damaged = bytearray(data)
    damaged[at] ^= 1 << draw.draw(st.integers(0, 7))
    refs = [descriptor.slice(index) for index in range(len(payloads))]
    hit = [index for index, ref in enumerate(refs) if ref.offset <= at < ref.offset + ref.length]
    problems = check(bytes(damaged), descriptor, cuts)
    if hit:
        assert [where for where, _ in problems] == hit
    else:  # header, padding, index or footer
        assert problems
        assert {where for where, _ in problems} == {None}


@given(PAYLOADS, st.data())
def test_an_object_that_ends_early_never_passes(payloads, draw):
    data, descriptor = built(payloads)
    kept = draw.draw(st.integers(0, len(data) - 1))
    assert check(data[:kept], descriptor)


def test_slices_of_several_blocks():
    payload = bytes(range(256)) * (BLOCK_BYTES // 256) + b"the rest"
    data, descriptor = built([b"small", payload, b""])
    assert check(data, descriptor, [BLOCK_BYTES, BLOCK_BYTES + 7]) == []
    wrong = bytearray(descriptor.packed_blocks)
    wrong[0] ^= 1
    problems = check(data, replace(descriptor, packed_blocks=bytes(wrong)))
    assert [where for where, _ in problems] == [1, None], "the slice's blocks, and the object's own index"


@pytest.mark.parametrize("other", [{"seq": 5}, {"payloads": [b"xx", b"b"]}])
def test_an_object_of_another_step_is_told_from_the_right_one(other):
    _, descriptor = built([b"a", b"b"])
    data, _ = built(**{"payloads": [b"a", b"b"], **other})
    assert check(data, descriptor)


@pytest.mark.parametrize("piece_bytes", [1, 100_003, 1 << 20])
def test_the_kind_is_told_by_the_beginning_of_each_slice_wherever_the_pieces_are_cut(piece_bytes):
    data, descriptor = built([LARGE[: 1_000 * piece_bytes], b"PK", b"raw", b"", LARGE[:600]])
    checker = TgbCheck(descriptor, content=".pt")
    for start in range(0, len(data), piece_bytes):
        checker.feed(memoryview(data)[start : start + piece_bytes])
        assert len(checker._first) <= HEAD_BYTES
    problems = dict(checker.finish())
    assert problems.keys() == {1, 2, 3}
    assert problems[2] == "content: is no .pt file (a zip archive, as torch.save writes): it begins with b'raw'"


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
    stored = bytearray(_STORED)
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
_STORED = encode_segment(LAKE_ID, 2, _SMALL)


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
