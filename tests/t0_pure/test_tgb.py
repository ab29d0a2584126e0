"""The TGB object: laid out without copies, readable without a log, honest about damage."""

from __future__ import annotations

import random
import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from t0_pure.strategies import payload_lists

from stepfs.errors import CorruptError, NewerFormatError, StepfsError
from stepfs.format import tgb
from stepfs.format.ids import BLOCK_BYTES, Epoch, SliceIndex
from stepfs.format.tgb import Descriptor


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
