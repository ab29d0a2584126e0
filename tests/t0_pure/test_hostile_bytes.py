"""Every decoder against hostile bytes, in little memory; limits of what is written; the record of a lake."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest
from crc32c import crc32c
from heads import LAKE, ME, STAMP, durable, fresh
from hypothesis import given, settings
from hypothesis import strategies as st
from t0_pure.strategies import commits

from stepfs.errors import CorruptError, NewerFormatError, RefusedError, StepfsError, UsageError
from stepfs.format import codec, control, identity, node, snapshot, tgb
from stepfs.format.codec import (
    ALWAYS_FITS,
    HEADER_BYTES,
    WEIGHT_FREE,
    WEIGHT_PER_BYTE,
    WRITER,
    Kind,
    check_shape,
    decode,
    encode,
)
from stepfs.format.commit import Commit, decode_commit, encode_commit
from stepfs.format.control import ControlRecord, decode_control, encode_control
from stepfs.format.grid import Grid
from stepfs.format.identity import LakeIdentity, decode_lake, encode_lake
from stepfs.format.ids import (
    DESCRIPTOR_BYTES_MAX,
    ID_BYTES_MAX,
    INTEGER_MAX,
    POSITION_BYTES_MAX,
    PRODUCERS_MAX,
    RECORDS_MAX,
    SEGMENT_STEPS,
    SLICES_MAX,
    TOTAL_MAX,
    Epoch,
    SegmentIndex,
    SliceIndex,
    Step,
    Version,
)
from stepfs.format.node import NodeRecord, encode_node
from stepfs.format.snapshot import (
    LogState,
    ProducerState,
    Segment,
    StepEntry,
    decode_segment,
    decode_snapshot,
    encode_segment,
    encode_snapshot,
    genesis,
)
from stepfs.format.tgb import Descriptor, SliceRef, descriptor_body, pack_slices
from stepfs.lake.log.apply import rehearsed
from stepfs_producer.commit.rebase import POSITIONS_BYTES_MAX, NothingLeft, Stamp, rebase, rebase_start
from stepfs_producer.commit.uploads import check_records, freeze, pack_position, unpack_position

DECODERS: dict[Kind, Callable[[bytes], object]] = {
    Kind.LAKE: lambda data: identity.decode_lake(data, "x"),
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


@given(data=st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    for kind, decoder in DECODERS.items():
        accepts_or_refuses(decoder, data)
        accepts_or_refuses(decoder, envelope(kind, data))


@settings(max_examples=60)
@given(body=maps)
def test_well_formed_maps_with_absurd_values(body: dict[str, object]) -> None:
    packed = msgpack.packb(body, use_bin_type=True)
    for kind, decoder in DECODERS.items():
        accepts_or_refuses(decoder, envelope(kind, packed))


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
    assert identity.decode_lake(envelope(Kind.LAKE, more), "x").slices == 1
    with pytest.raises(NewerFormatError, match="upgrade"):
        identity.decode_lake(envelope(Kind.LAKE, more, version=2), "x")
    with pytest.raises(CorruptError, match="kind 2, expected LAKE"):
        identity.decode_lake(envelope(Kind.COMMIT, more), "x")


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
    assert identity.decode_lake(stored, "x").slices == 1
    for place in range(8 * len(stored)):
        rotten = bytearray(stored)
        rotten[place // 8] ^= 1 << place % 8
        with pytest.raises(StepfsError):
            identity.decode_lake(bytes(rotten), "x")


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
    [
        *(pytest.param(name, "tgbs", marks=() if name == "empty maps" else pytest.mark.nightly) for name in WASTE),
        ("empty maps", "invented_later"),
        ("short texts", "invented_later"),
    ],
)
def test_a_quarter_megabyte_of_small_values_takes_a_small_multiple_of_itself(name: str, field: str) -> None:
    body = b"\x81" + msgpack.packb(field) + wide(WASTE[name], MIB // 4)
    data = envelope(Kind.COMMIT, body)
    assert peak_of(DECODERS[Kind.COMMIT], data) <= BOUND_PER_BYTE * len(data) + SLACK


@pytest.mark.parametrize("announced", [b"\xdc\x3e\x80", b"\xdd\x00\x00\x3e\x80", b"\xde\x3e\x80"])
def test_announcements_on_many_levels_are_added_up(announced: bytes) -> None:
    data = envelope(Kind.COMMIT, announced * 400 + b"\xc0" * 16_000)
    assert peak_of(DECODERS[Kind.COMMIT], data) <= BOUND_PER_BYTE * len(data) + MIB


@pytest.mark.parametrize("head", [0xDC, 0xDE])
def test_a_short_object_takes_no_more_than_every_object_may(head: int) -> None:
    levels = ALWAYS_FITS // 3
    data = envelope(Kind.COMMIT, struct.pack(">BH", head, 3 * levels) * levels)
    assert peak_of(DECODERS[Kind.COMMIT], data) < WEIGHT_FREE


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


CONTROL = ControlRecord(b"i" * 16, 1, Step(1), Version(1))


def at(total_bytes: int, total_records: int) -> LogState:
    return replace(fresh(), total_bytes=total_bytes, total_records=total_records)


def next_commit(head: LogState) -> Commit:
    commit = rebase(head, [durable(0)], ME, STAMP)
    assert isinstance(commit, Commit)
    return commit


@pytest.mark.parametrize(
    "head", [at(0, 0), at(INTEGER_MAX - 6, 0), at(0, INTEGER_MAX), at(TOTAL_MAX - 7, TOTAL_MAX - 1)]
)
def test_a_total_of_any_size_reads_back(head: LogState) -> None:
    commit = next_commit(head)
    body = rehearsed(head, commit)
    assert decode_commit(body, "x") == commit
    after = replace(head, total_bytes=commit.total_bytes, total_records=commit.total_records)
    assert decode_snapshot(encode_snapshot(after), "x") == after


def test_a_control_record_counts_as_far_as_the_lake() -> None:
    for deleted in (INTEGER_MAX, INTEGER_MAX + 1, TOTAL_MAX):
        record = replace(CONTROL, deleted_bytes=deleted)
        assert decode_control(encode_control(LAKE, record), "x") == (LAKE, record)


@pytest.mark.parametrize("head", [at(TOTAL_MAX - 6, 0), at(0, TOTAL_MAX)], ids=["bytes", "records"])
def test_a_full_lake_refuses_the_append_and_says_what_to_do(head: LogState) -> None:
    with pytest.raises(RefusedError, match=r"the lake is full.*stepfs fork"):
        rebase(head, [durable(0)], ME, STAMP)


def test_what_one_append_may_count_is_bounded() -> None:
    per_slice = RECORDS_MAX // SLICES_MAX
    assert sum(check_records([per_slice] * SLICES_MAX, slices=SLICES_MAX)) == RECORDS_MAX
    with pytest.raises(UsageError, match="at most 1099511627776 can be counted"):
        check_records([per_slice] * (SLICES_MAX - 1) + [per_slice + 1], slices=SLICES_MAX)


def test_a_batch_whose_checksums_no_segment_could_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepfs_producer.commit.uploads.DESCRIPTOR_BYTES_MAX", 24 * 2 - 1)
    with pytest.raises(UsageError, match="48 bytes of checksums in the log, at most 47 fit"):
        freeze([b"a", b"b"], grid=Grid(2), bytes_max=9)
    assert 24 * SLICES_MAX < DESCRIPTOR_BYTES_MAX


@pytest.mark.parametrize(
    "wrong", [
        {"time_ms": INTEGER_MAX + 1}, {"next_seq": INTEGER_MAX + 1}, {"total_bytes": TOTAL_MAX + 1},
        {"producer_id": "x" * 257}, {"tgbs": ()},
        {"tgbs": (replace(durable(0).tgb, size=3),)}, {"total_records": 7}, {"first_step": Step(5)},
        {"epoch": 9}, {"prev_digest": b"?" * 32},
    ], ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_no_commit_that_a_reader_refuses_gets_as_far_as_the_store(wrong: dict[str, object]) -> None:
    head = fresh()
    with pytest.raises(RefusedError, match="is not written"):
        rehearsed(head, replace(next_commit(head), **wrong))  # type: ignore[arg-type]


def test_no_encoder_returns_what_its_decoder_refuses() -> None:
    head = fresh()
    broken = Descriptor(256, "key", 99, 0, *pack_slices([SliceRef(0, 1, 1, 1, ())]))
    with pytest.raises(RefusedError, match="a snapshot that no reader would accept"):
        encode_snapshot(replace(head, next_step=Step(3)))
    with pytest.raises(RefusedError, match="a commit that no reader would accept"):
        encode_commit(replace(next_commit(head), tgbs=(broken,)))
    with pytest.raises(RefusedError, match="a control that no reader would accept"):
        encode_control(LAKE, replace(CONTROL, deleted_bytes=TOTAL_MAX + 1))
    with pytest.raises(CorruptError):
        decode_commit(codec.encode(Kind.COMMIT, {}), "x")


MOMENT = Stamp(b"c" * 16, 1000)
OVERHEAD_BYTES = 8 << 20  # keys, names, references


def crowd(count: int, position: bytes = b"") -> LogState:
    producers = {
        f"p{n}": ProducerState(f"p{n}", Epoch(1), b"i" * 16, 0, position, False, Version(n), 1000, WRITER)
        for n in range(count)
    }
    return replace(genesis("0" * 32, 1), version=Version(count), producers=producers)


def test_the_widest_steps_fit_an_index_segment_and_a_snapshot_with_all_producers() -> None:
    slices, blocks = pack_slices([SliceRef(64 * n, 1, 1, 1, ()) for n in range(1, SLICES_MAX + 1)])
    entry = len(msgpack.packb(descriptor_body(Descriptor(0, "k" * 200, 1 << 40, 1, slices, blocks))))
    states = POSITIONS_BYTES_MAX + PRODUCERS_MAX * (ID_BYTES_MAX + 200)
    assert SEGMENT_STEPS * entry + states + OVERHEAD_BYTES < codec.OBJECT_BYTES_MAX


def test_a_snapshot_of_as_many_producers_as_a_lake_may_know_is_read_again() -> None:
    state = crowd(PRODUCERS_MAX)
    body = encode_snapshot(state)
    assert decode_snapshot(body, "snapshot").producers == state.producers
    assert len(body) < 120 * PRODUCERS_MAX, "what a lake pays for each id, beside its position"


def test_one_producer_id_more_is_refused_and_a_known_one_is_not() -> None:
    full = crowd(PRODUCERS_MAX)
    with pytest.raises(RefusedError, match=r"16384 producer ids.*use ids again"):
        rebase_start(full, "another", b"n" * 16, MOMENT)
    assert not isinstance(rebase_start(full, "p7", b"n" * 16, MOMENT), NothingLeft)
    with pytest.raises(RefusedError, match="bytes of positions"):
        rebase_start(crowd(600, bytes(64 << 10)), "another", b"n" * 16, MOMENT)


def test_an_object_that_no_reader_would_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "OBJECT_BYTES_MAX", 100)
    with pytest.raises(RefusedError, match=r"a snapshot of .* is not written"):
        encode_snapshot(crowd(3))


PLAIN = LakeIdentity("a" * 32, Grid(2), ".npy", 7)


def body(identity):
    return msgpack.unpackb(encode_lake(identity)[HEADER_BYTES:])


def test_what_a_lake_without_promises_stores():
    assert body(PLAIN) == {
        "lake": "a" * 32, "slices": 2, "grid": {"ranks": 2, "micro": 1, "cp": 1, "files": [""]}, "ext": ".npy", "created": 7,
        "writer": WRITER,
    }  # fmt: skip


def test_a_promise_is_one_more_key_and_readers_ignore_those_that_they_do_not_know():
    promised = LakeIdentity("a" * 32, Grid(2), ".npy", 7, check_payload=True)
    assert decode_lake(encode_lake(promised), "x") == promised
    assert body(promised) == {**body(PLAIN), "check_payload": True}
    later = encode(Kind.LAKE, {**body(promised), "a_key_of_tomorrow": [1, {"x": b"y"}]})
    assert decode_lake(later, "x") == promised


@given(
    st.builds(
        Grid,
        st.integers(1, 8),
        st.integers(1, 8),
        st.integers(1, 8),
        st.lists(st.from_regex(r"([a-z][a-z0-9_]{0,31})?", fullmatch=True), min_size=1, max_size=4, unique=True).map(
            tuple
        ),
    )
)
def test_a_grid_survives_its_journey_and_numbers_each_slice_once(grid):
    identity = LakeIdentity("a" * 32, grid, ".npy", 7)
    assert decode_lake(encode_lake(identity), "x") == identity
    places = list(itertools.product(range(grid.units), range(grid.cp), range(len(grid.files))))
    assert [grid.slice_of(*place) for place in places] == list(range(grid.slices))
    assert [grid.place_of(index) for index in map(SliceIndex, range(grid.slices))] == places


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 3}, {"micro": 2}, {"cp": 2}, {"files": ["", "b"]}, {"files": []}, {"ranks": 0}, {"ranks": 1 << 15},
        {"ranks": 1, "files": ["", ""]}, {"files": ["A"]}, {"files": ["a/b"]}, {"files": ["a\n"]}, {"cp": True},
        {"micro": None},
    ],
)  # fmt: skip
def test_a_grid_that_contradicts_the_slices_or_is_none_is_corrupt(change):
    grid = {**body(PLAIN)["grid"], **change}
    with pytest.raises(CorruptError, match="grid"):
        decode_lake(encode(Kind.LAKE, {**body(PLAIN), "grid": grid}), "x")


def test_a_lake_without_a_grid_is_corrupt():
    without = {name: value for name, value in body(PLAIN).items() if name != "grid"}
    with pytest.raises(CorruptError, match="grid"):
        decode_lake(encode(Kind.LAKE, without), "x")


PLAIN_LAKE = "a" * 32
RECORD = NodeRecord("run", "gpu-7", "/mnt/run", 12, "1.0", Step(5), Step(0), 1000, 99)


def test_readers_go_by_name() -> None:
    encoded = encode_node(PLAIN_LAKE, RECORD)
    assert encoded[7] == 1
    assert decode(Kind.NODE, encoded, "x").integer("time") == 99  # they read by name and ignore the rest
