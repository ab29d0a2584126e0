"""The bytes of every stored object: from the first release on they bind, and a change here is a new format.

They stand as SHA-256: `decode` of the same test says what a byte means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest

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
        "fork:" + "e" * 32: GroupRecord(start=Step(10), fork="file:///new"),
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
    producers={"p": ProducerState("p", Epoch(1), b"n" * 16, 8, b"\x07", False, Version(5), 1_700_000_000_000)},
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

GOLDEN: dict[str, str] = {
    "lake": "a6166a0fc774511f40dd00aa2d5a5d5be0032326fd03b26de2df9219956ebd13",
    "data commit": "e95c3362e51b888ac3ac08d9ef88824fd08387720f4f912ad9e36213f2142c27",
    "epoch commit": "719114925b7798a63aedcd2c20a6ac9550307950ce921cc7ca6f1adbe5e87113",
    "origin commit": "35f28c5db9d1c68954eb2795def6cf542e99dff506589de8e2ba4bbe0a3677c1",
    "control": "7870e433373159e74565e0757bbe86ab78660b43ddbe1feb1ff72cf461a12502",
    "snapshot": "faa6bc6ad28c3a432d97d4bac38e4281180bc8dad288b229d547d2d4a70da588",
    "segment": "50f86e2bb3173d79a9aa17d3032036ed84b3697f3e6734c83212db8601322bc4",
    "node": "883ea2555b618b3485201841f66750c090f6d9c470c8ae56566082e6077e9178",
    "tgb": "167241259dc222a491f5fad9fae68bf658eb27bdd32bb964fe8ce50b0c935d1c",
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


def _shown(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
