"""The streaming checker finds every damaged byte wherever the pieces are cut, and nothing in an intact object."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.format import tgb
from stepfs.format.ids import BLOCK_BYTES, Epoch
from stepfs.format.records import HEAD_BYTES
from stepfs.format.tgb import Descriptor
from stepfs.lake.verify.lake import TgbCheck


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
