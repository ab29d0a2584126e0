"""Every decoder against bytes that nobody wrote in good faith: `StepfsError` or a value, quickly, in little memory."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from t0_pure.strategies import commits

from stepfs.errors import CorruptError, NewerFormatError, StepfsError
from stepfs.format import codec, control, node, records, snapshot, tgb
from stepfs.format.codec import Kind
from stepfs.format.commit import decode_commit, encode_commit
from stepfs.format.ids import Step

DECODERS: dict[Kind, Callable[[bytes], object]] = {
    Kind.LAKE: lambda data: records.decode_lake(data, "x"),
    Kind.COMMIT: lambda data: decode_commit(data, "x"),
    Kind.SNAPSHOT: lambda data: snapshot.decode_snapshot(data, "x"),
    Kind.STEP_ENTRY: lambda data: snapshot.decode_step_record(data, "x"),
    Kind.CONTROL: lambda data: control.decode_control(data, "x"),
    Kind.NODE: lambda data: node.decode_node(data, "x"),
    Kind.TGB_INDEX: lambda data: tgb.read_index(data, size=1000, what="x"),
}
FIELDS = [
    "lake", "slices", "grid", "ranks", "micro", "cp", "files", "ext", "created", "version", "kind", "id", "prev", "producer", "epoch", "incarnation", "next_seq",
    "position", "first_step", "tgbs", "time", "bytes", "records", "retired", "digest", "next_step", "sealed", "steps",
    "producer_states", "origins", "first_segment", "segments", "producers", "index", "floor", "first_live_step",
    "deleted_bytes", "groups", "name", "kept", "recorded", "start", "minima", "fork", "origin", "key", "size", "seq", "blocks",
    "host", "directory", "pid", "stepfs", "read_to", "waited",
]  # fmt: skip
LAKE_BODY = {
    "lake": "0" * 32, "slices": 1, "grid": {"ranks": 1, "micro": 1, "cp": 1, "files": [""]}, "ext": ".pt",
    "created": 0,
}  # fmt: skip
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=99)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | leaves, inner, max_size=9),
    max_leaves=12,
)
maps = st.dictionaries(st.sampled_from(FIELDS), values, max_size=20)


def envelope(kind: int, body: bytes, *, version: int = codec.FORMAT_VERSION) -> bytes:
    """As every format is sealed: the checksum covers the header too."""
    header = struct.pack("<6sBBI", b"stepfs", kind, version, len(body))
    return header + struct.pack("<I", crc32c(header + body)) + body


def accepts_or_refuses(decoder: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(StepfsError):
        decoder(data)


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.binary(max_size=300))
def test_random_bytes(kind: Kind, data: bytes) -> None:
    accepts_or_refuses(DECODERS[kind], data)
    accepts_or_refuses(DECODERS[kind], envelope(kind, data))


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=25)
@given(body=maps)
def test_well_formed_maps_with_absurd_values(kind: Kind, body: dict[str, object]) -> None:
    accepts_or_refuses(DECODERS[kind], envelope(kind, msgpack.packb(body, use_bin_type=True)))


@given(commits())
def test_a_commit_survives_its_journey(commit: object) -> None:
    assert decode_commit(encode_commit(commit), "x") == commit  # type: ignore[arg-type]


@given(commits(), st.data())
def test_any_flipped_byte_of_a_commit_is_noticed(commit: object, data: st.DataObject) -> None:
    stored = bytearray(encode_commit(commit))  # type: ignore[arg-type]
    place = data.draw(st.integers(0, len(stored) - 1))
    stored[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError):
        decode_commit(bytes(stored), "x")


def test_every_flipped_bit_of_an_envelope_is_damage_and_none_asks_for_an_upgrade() -> None:
    for kind in DECODERS:
        stored = codec.encode(kind, {"lake": "0" * 32, "bytes": 2**53 + 1})
        assert stored[7] == 1
        for bit in range(8 * len(stored)):
            flipped = bytearray(stored)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptError):
                codec.decode(kind, bytes(flipped), "x")


@pytest.mark.parametrize("version", [2, 7, 255])
def test_a_later_format_is_believed_only_whole(version: int) -> None:
    body = msgpack.packb({"invented": "later"})
    stored = envelope(Kind.COMMIT, body, version=version)
    with pytest.raises(NewerFormatError, match=f"format {version}, this stepfs reads format 1; upgrade"):
        decode_commit(stored, "x")
    with pytest.raises(CorruptError):
        decode_commit(stored[:-1], "x")
    with pytest.raises(CorruptError):
        decode_commit(stored[:-1] + b"?", "x")


def test_a_node_record_survives_its_journey_and_any_name() -> None:
    record = node.NodeRecord("run", "gpu-7", "/mnt/run", 12, "1.0", Step(5), Step(0), 1000, 99)
    assert node.decode_node(node.encode_node("0" * 32, record), "x") == ("0" * 32, record)
    assert (record.frontier, record.last_step) == (4, None)
    odd = dataclasses.replace(record, directory="/mnt/\udcff" + "é" * 5000)
    assert node.decode_node(node.encode_node("0" * 32, odd), "x")[1].directory.endswith("é")
    assert node.node_name(odd.host, odd.directory) != node.node_name(record.host, record.directory)


def test_unknown_keys_are_ignored_and_unknown_kinds_and_versions_stop_the_reader() -> None:
    more = msgpack.packb({**LAKE_BODY, "invented_later": [1, 2]})
    assert records.decode_lake(envelope(Kind.LAKE, more), "x").slices == 1
    with pytest.raises(NewerFormatError, match="upgrade"):
        records.decode_lake(envelope(Kind.LAKE, more, version=2), "x")
    with pytest.raises(CorruptError, match="kind 2, expected LAKE"):
        records.decode_lake(envelope(Kind.COMMIT, more), "x")


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",  # array that claims 2³² items
        b"\xdf\xff\xff\xff\xff",  # map that claims 2³² items
        b"\xc6\xff\xff\xff\xff",  # binary that claims 4 GiB
        b"\x91" * 100_000,  # nested beyond any stack
        (b"\xdd" + struct.pack(">I", 16_000)) * 2_000 + b"\xc0" * 16_000,  # each level claims room for all that follows
    ],
    ids=["array", "map", "binary", "depth", "depth times width"],
)
def test_a_bomb_is_refused_in_little_memory(bomb: bytes) -> None:
    data = envelope(Kind.COMMIT, bomb)
    tracemalloc.start()
    with pytest.raises(CorruptError):
        decode_commit(data, "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 128 << 20


def test_any_flipped_bit_of_an_envelope_is_noticed() -> None:
    stored = codec.encode(Kind.LAKE, LAKE_BODY)
    assert records.decode_lake(stored, "x").slices == 1
    for place in range(8 * len(stored)):
        rotten = bytearray(stored)
        rotten[place // 8] ^= 1 << place % 8
        with pytest.raises(StepfsError):
            records.decode_lake(bytes(rotten), "x")
