"""No decoder takes more memory than a small multiple of its input, whatever the input is."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from t0_pure.test_hostile_bytes import DECODERS, FIELDS, envelope
from t0_pure.test_rebase import durable

from stepfs.errors import CorruptError, StepfsError, UsageError
from stepfs.format.codec import WEIGHT_FREE, WEIGHT_PER_BYTE, Kind, check_shape
from stepfs.format.ids import POSITION_BYTES_MAX, SEGMENT_STEPS, Epoch, SegmentIndex, Step, Version
from stepfs.format.snapshot import Segment, StepEntry, decode_segment, encode_segment
from stepfs_producer.commit.uploads import pack_position, unpack_position

MIB = 1 << 20
BOUND_PER_BYTE = WEIGHT_PER_BYTE + 2  # msgpack's values, the strings in them, one copy
SLACK = WEIGHT_FREE + 2 * MIB  # and the list of `Fields` of the widest array
WASTE = {
    "empty maps": b"\x80", "empty lists": b"\x90", "lists of one": b"\x91\xc0", "maps of one": b"\x81\xc0\xc0",
    "short texts": b"\xa2xy", "short binaries": b"\xc4\x02xy", "integers": b"\xcd\x12\x34", "floats": b"\xca1234",
    "extensions": b"\xd4\x01x", "counted extensions": b"\xc7\x01\x01x", "timestamps": b"\xd6\xff1234",
}  # fmt: skip


def peak_of(decoder: Callable[[bytes], object], data: bytes) -> int:
    tracemalloc.start()
    try:
        with contextlib.suppress(StepfsError):
            decoder(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def array(items: int) -> bytes:
    return b"\xdd" + struct.pack(">I", items)


def wide(item: bytes, total: int) -> bytes:
    """About `total` bytes of `item`, in as many arrays as the widest that is accepted makes necessary."""
    per_row = 16_000
    row = array(per_row) + item * per_row
    rows = max(1, total // len(row))
    return array(rows) + row * rows


@pytest.mark.parametrize(
    ("name", "field"),
    [*((name, "tgbs") for name in WASTE), ("empty maps", "invented_later"), ("short texts", "invented_later")],
)
def test_a_quarter_megabyte_of_small_values_takes_a_small_multiple_of_itself(name: str, field: str) -> None:
    body = b"\x81" + msgpack.packb(field) + wide(WASTE[name], MIB // 4)
    data = envelope(Kind.COMMIT, body)
    assert peak_of(DECODERS[Kind.COMMIT], data) <= BOUND_PER_BYTE * len(data) + SLACK


@pytest.mark.parametrize("announced", [b"\xdc\x3e\x80", b"\xdd\x00\x00\x3e\x80", b"\xde\x3e\x80"])
def test_announcements_on_many_levels_are_added_up(announced: bytes) -> None:
    data = envelope(Kind.COMMIT, announced * 400 + b"\xc0" * 16_000)
    assert peak_of(DECODERS[Kind.COMMIT], data) <= BOUND_PER_BYTE * len(data) + MIB


def pieces() -> st.SearchStrategy[bytes]:
    """Fragments of msgpack: true ones, headers that promise too much, and rubbish."""
    headers = st.builds(
        lambda head, size: head + size,
        st.sampled_from([bytes([head]) for head in (*range(0xC4, 0xCA), *range(0xD4, 0xE0), 0x8F, 0x9F)]),
        st.binary(max_size=5),
    )
    keys = st.sampled_from(FIELDS).map(msgpack.packb)
    return headers | keys | st.sampled_from(list(WASTE.values())) | st.binary(max_size=20)


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=8)
@given(parts=st.lists(st.tuples(pieces(), st.integers(1, 2000)), min_size=1, max_size=5))
def test_no_decoder_takes_more_than_a_small_multiple(kind: Kind, parts: list[tuple[bytes, int]]) -> None:
    body = b"".join(piece * times for piece, times in parts)
    for data in (envelope(kind, body), envelope(kind, b"\x81\xa5steps" + body), envelope(kind, array(20) + body)):
        assert peak_of(DECODERS[kind], data) <= BOUND_PER_BYTE * len(data) + SLACK


@settings(max_examples=40)
@given(parts=st.lists(st.tuples(pieces(), st.integers(1, 3000)), min_size=1, max_size=8))
def test_what_msgpack_reads_the_walk_admits_unless_it_is_wasteful(parts: list[tuple[bytes, int]]) -> None:
    body = b"".join(piece * times for piece, times in parts)[: WEIGHT_FREE // 200]
    for data in (body, b"\x91" + body, msgpack.packb([body.hex(), {1: body}, [1.5, None, "é"]])):
        try:
            msgpack.unpackb(data, strict_map_key=False)
        except Exception:  # noqa: BLE001 - it raises a zoo; what it refuses, the walk may pass
            continue
        check_shape(data, "x")


@pytest.mark.parametrize("item", WASTE.values(), ids=WASTE)
def test_every_position_that_fits_reads_back(item: bytes) -> None:
    count = (POSITION_BYTES_MAX - 5) // len(item)
    count = min(count, 16_000)
    rows = (POSITION_BYTES_MAX - 5) // (5 + count * len(item))
    packed = array(rows) + (array(count) + item * count) * rows
    assert len(packed) <= POSITION_BYTES_MAX
    assert unpack_position(packed) is not None
    assert peak_of(unpack_position, packed) < 8 * MIB


def test_a_position_of_nested_announcements_is_refused_in_little_memory() -> None:
    bomb = b"\xdc\x3e\x80" * 500 + b"\xc0" * 16_000
    with pytest.raises(CorruptError):
        unpack_position(bomb)
    assert peak_of(unpack_position, bomb) < 2 * MIB
    with pytest.raises(UsageError, match="at most 65536 fit"):
        pack_position([0] * (1 << 20))


def test_the_lightest_steps_are_far_from_the_bound() -> None:
    entries = tuple(StepEntry(Step(n), Version(n), n, "p", Epoch(1), durable(n % 10).tgb) for n in range(SEGMENT_STEPS))
    stored = encode_segment("0" * 32, 1, Segment(SegmentIndex(0), b"d" * 8, entries))
    assert peak_of(lambda data: decode_segment(data, 1, "x"), stored) < WEIGHT_PER_BYTE * len(stored)
