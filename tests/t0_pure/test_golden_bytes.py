"""The bytes of every stored object: from the first release on they bind, and a change here is a new format. What a later
version adds to them stops who must know it, and is kept by who need not.

They stand as SHA-256: `decode` of the same test says what a byte means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfs import __version__
from stepfs.errors import NewerFormatError
from stepfs.format import codec
from stepfs.format.codec import HEADER_BYTES, Kind, encode, envelope_bytes, unpack
from stepfs.format.commit import Commit, CommitKind, Origin, decode_commit, encode_commit
from stepfs.format.control import ControlRecord, GroupRecord, decode_control, encode_control
from stepfs.format.grid import Grid
from stepfs.format.identity import LakeIdentity, decode_lake, encode_lake
from stepfs.format.ids import SEGMENT_STEPS, Epoch, SegmentIndex, SliceIndex, Step, Version
from stepfs.format.node import NodeRecord, decode_node, encode_node
from stepfs.format.snapshot import (
    LogState,
    ProducerState,
    Segment,
    StepEntry,
    decode_segment,
    decode_snapshot,
    encode_segment,
    encode_snapshot,
    pack_ref,
)
from stepfs.format.tgb import FOOTER_BYTES, HEADER, Descriptor, build, read_footer, read_header, read_index

LAKE = "0123456789abcdef" * 2
PATCH = pytest.MonkeyPatch()
PATCH.setattr(codec, "WRITER", "stepfs 0.1.0")  # of the objects below, whatever version this is
IMAGE = build(
    lake_id=LAKE, producer_id="p", epoch=Epoch(1), seq=7, payloads=[b"slice zero", b"one"], records=[2, 1],
)  # fmt: skip
TGB = Descriptor(0, f"{LAKE}/data/x/y.tgb", IMAGE.size, 7, IMAGE.packed_slices, IMAGE.packed_blocks)
COMMIT = Commit(
    version=Version(5), lake_id=LAKE, kind=CommitKind.DATA, commit_id=b"i" * 16, prev_digest=b"d" * 32,
    producer_id="p", epoch=Epoch(1), incarnation=b"n" * 16, next_seq=8, position=b"\x07", first_step=Step(7),
    tgbs=(TGB,), time_ms=1_700_000_000_000, total_bytes=1 << 60, total_records=24, control=3,
)  # fmt: skip
EPOCH = replace(
    COMMIT, version=Version(6), kind=CommitKind.EPOCH, epoch=Epoch(2), incarnation=b"m" * 16, position=b"",
    first_step=Step(8), tgbs=(), time_ms=1_700_000_000_001, total_bytes=13, total_records=3, control=0, retired=True,
    writer="stepfs 0",
)  # fmt: skip
ORIGIN = Origin("s3://b/parent", "f" * 32, Step(4), Step(6), Step(9))
ORIGIN_COMMIT = Commit(
    version=Version(1), lake_id=LAKE, kind=CommitKind.ORIGIN, commit_id=b"i" * 16, prev_digest=b"d" * 32,
    producer_id="", epoch=Epoch(0), incarnation=bytes(16), next_seq=0, position=b"", first_step=Step(9), tgbs=(),
    time_ms=1, total_bytes=13, total_records=3, origin=ORIGIN,
)  # fmt: skip
CONTROL = ControlRecord(
    record_id=b"r" * 16,
    time_ms=1_700_000_000_000,
    first_live_step=Step(10),
    floor=Version(4),
    deleted_bytes=1 << 60,
    groups={
        "run": GroupRecord(start=Step(10), kept=(Step(20), Step(30)), recorded=(Step(30), Step(20))),
        ":fork/" + "e" * 32: GroupRecord(start=Step(10), fork="file:///new"),
    },
    minima=((4, Step(10)), (9, Step(12))),
    pauses_asked=3,
)


def entry(step: int) -> StepEntry:
    return StepEntry(Step(step), Version(step), 1_700_000_000_000 + step, "p", Epoch(1), TGB)


SEGMENT = Segment(SegmentIndex(1), b"s" * 8, tuple(entry(SEGMENT_STEPS + n) for n in range(SEGMENT_STEPS)))
STATE = LogState(
    lake_id=LAKE, slices=2, version=Version(5), digest=b"d" * 32, next_step=Step(2 * SEGMENT_STEPS + 1),
    time_ms=1_700_000_000_000, total_bytes=13, total_records=3, control=3, sealed=False,
    producers={"p": ProducerState("p", Epoch(1), b"n" * 16, 8, b"\x07", False, Version(5), 1_700_000_000_000, "stepfs 0")},
    origins=(ORIGIN,), first_segment=SegmentIndex(1), segment_refs=pack_ref(SEGMENT),
    tail=(entry(2 * SEGMENT_STEPS),),
)  # fmt: skip
NODE = NodeRecord("run", "host", "/mnt/run", 4711, "0.1.0", Step(9), Step(8), 12, 1_700_000_000_000)
IDENTITY = LakeIdentity(LAKE, Grid(2), ".safetensors", 1_700_000_000_000, check_payload=True)


def with_lake(decode: Callable[[bytes, str], tuple[str, object]]) -> Callable[[bytes, str], object]:
    def value(data: bytes, what: str) -> object:
        lake_id, found = decode(data, what)
        assert lake_id == LAKE
        return found

    return value


OBJECTS: dict[str, tuple[bytes, Callable[[bytes, str], object], object]] = {
    "lake": (encode_lake(IDENTITY), decode_lake, IDENTITY),
    "data commit": (encode_commit(COMMIT), decode_commit, COMMIT),
    "epoch commit": (encode_commit(EPOCH), decode_commit, EPOCH),
    "origin commit": (encode_commit(ORIGIN_COMMIT), decode_commit, ORIGIN_COMMIT),
    "control": (encode_control(LAKE, CONTROL), with_lake(decode_control), CONTROL),
    "snapshot": (encode_snapshot(STATE), decode_snapshot, STATE),
    "segment": (encode_segment(LAKE, 2, SEGMENT), with_lake(lambda data, what: decode_segment(data, 2, what)), SEGMENT),
    "node": (encode_node(LAKE, NODE), with_lake(decode_node), NODE),
}

INDEX_AT, INDEX_BYTES = read_footer(b"".join(IMAGE.parts)[-FOOTER_BYTES:], size=IMAGE.size, what="tgb")
PATCH.undo()

GOLDEN: dict[str, str] = {
    "lake": "31db0b90972932cf77b9ee5c991f010ca337cb064df618509354f8cc2efebb91",
    "data commit": "0ad8688a3285df12d56069549b238495f30c5e0c2abbf43a34cce5e6c1d1fc0c",
    "epoch commit": "4264cc7124fa6e1e9df9293f50d3b7e0a1dfef9e5473d95eaf72afa5536afa00",
    "origin commit": "35f28c5db9d1c68954eb2795def6cf542e99dff506589de8e2ba4bbe0a3677c1",
    "control": "c81cca6816d5d717440d6337569bdea8d11b8bfb026ffe992146383bd2c75e54",
    "snapshot": "613c1551e3424df1f57afdeefc4bc6e3d78047f38015bdbb8d61aad1f31efed9",
    "segment": "a1d2325ff8a8199d68e1d792d962eb053133d76937a6ea6a91fa45317a2cf5b1",
    "node": "883ea2555b618b3485201841f66750c090f6d9c470c8ae56566082e6077e9178",
    "tgb": "014d933c6ba5f9552cf7a6201aae9c10be2e89ddad940ef20f9871ce1fe21440",
}


@pytest.mark.parametrize("name", OBJECTS)
def test_the_bytes_of_an_object(name: str) -> None:
    data, decode, value = OBJECTS[name]
    assert decode(data, name) == value
    assert _shown(data) == GOLDEN[name]


def test_the_bytes_of_a_tgb() -> None:
    data = b"".join(IMAGE.parts)
    assert _shown(data) == GOLDEN["tgb"]
    read_header(data[: len(HEADER)], "tgb")
    offset, length = read_footer(data[-FOOTER_BYTES:], size=len(data), what="tgb")
    index = read_index(data[offset : offset + length], size=len(data), what="tgb")
    assert (index.lake_id, index.producer_id, index.seq) == (LAKE, "p", 7)
    assert data[TGB.slice(SliceIndex(1)).offset :].startswith(b"one")


def changed(data: bytes, change: Callable[[Any], object]) -> bytes:
    """The object as a later version would write it; of a segment, its first entry."""
    end = envelope_bytes(data, "x")
    body = unpack(data[HEADER_BYTES:end], "x")
    change(body)
    fresh = encode(Kind(data[6]), body)  # type: ignore[arg-type]
    return fresh + data[max(end, len(fresh)) :]


def map_of(data: bytes) -> Any:
    return unpack(data[HEADER_BYTES : envelope_bytes(data, "x")], "x")


TGB_INDEX = b"".join(IMAGE.parts)[INDEX_AT : INDEX_AT + INDEX_BYTES]
ALL = {name: (data, decode) for name, (data, decode, _) in OBJECTS.items()} | {
    "tgb index": (TGB_INDEX, lambda data, what: read_index(data, size=IMAGE.size, what=what))
}


@pytest.mark.parametrize("name", ALL)
def test_what_an_object_needs_stops_a_reader_that_lacks_it(name: str) -> None:
    data, decode = ALL[name]
    decode(changed(data, lambda body: body.update(needs=[])), name)
    with pytest.raises(
        NewerFormatError, match=f"^{name}.*: needs pins, which this stepfs does not have; upgrade stepfs$"
    ):
        decode(changed(data, lambda body: body.update(needs=["pins"])), name)


def more(*path: object) -> Callable[[Any], object]:
    """Put keys of a later version into a map of an object."""

    def put(body: Any) -> None:
        for part in path:
            body = body[part]
        body.update({"later": [1, {"x": b"y"}], "needs": []} if not path else {"owner": "alice"})

    return put


@pytest.mark.parametrize(
    ("name", "path", "again"),
    [
        ("control", (), lambda value: encode_control(LAKE, value)),
        ("control", ("groups", 0), lambda value: encode_control(LAKE, value)),
        ("snapshot", (), encode_snapshot),
        ("snapshot", ("producer_states", 0), encode_snapshot),
        ("snapshot", ("origins", 0), encode_snapshot),
        ("snapshot", ("steps", 0), encode_snapshot),
        ("segment", (), lambda value: encode_segment(LAKE, 2, value)),
    ],
)  # fmt: skip
def test_keys_of_a_later_version_outlive_what_this_one_writes(
    name: str, path: tuple[object, ...], again: Callable[[Any], bytes]
) -> None:
    data, decode, _ = OBJECTS[name]
    later = changed(data, more(*path))
    assert map_of(later) != map_of(data)
    assert map_of(again(decode(later, name))) | {"writer": ""} == map_of(later) | {"writer": ""}


def test_the_keys_of_a_descriptor_come_from_a_commit_into_what_is_made_of_it() -> None:
    commit = decode_commit(changed(encode_commit(COMMIT), more("tgbs", 0)), "x")
    entries = tuple(replace(each, tgb=commit.tgbs[0]) for each in SEGMENT.entries)
    assert map_of(encode_segment(LAKE, 2, replace(SEGMENT, entries=entries)))["owner"] == "alice"
    assert map_of(encode_snapshot(replace(STATE, tail=(replace(STATE.tail[0], tgb=commit.tgbs[0]),))))["steps"][0][
        "owner"
    ]


def test_objects_name_their_writer() -> None:
    """But for those that are functions of the history, and the many."""
    named = {name for name, (data, _) in ALL.items() if "writer" in map_of(data)}
    assert named == {"lake", "epoch commit", "control", "tgb index"}
    assert map_of(encode_lake(IDENTITY))["writer"] == f"stepfs {__version__}"


def _shown(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
