"""The bytes of every stored object: from the first release on they bind, and a change here is a new format.

Small objects stand in full, as hex; a segment and its step records, of 512 steps each, as SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from stepfs.format.commit import Commit, CommitKind, Origin, decode_commit, encode_commit
from stepfs.format.control import ControlRecord, GroupRecord, decode_control, encode_control
from stepfs.format.grid import Grid
from stepfs.format.ids import SEGMENT_STEPS, Epoch, SegmentIndex, SliceIndex, Step, Version
from stepfs.format.node import NodeRecord, decode_node, encode_node
from stepfs.format.records import LakeIdentity, decode_lake, encode_lake
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
    lake_id=LAKE,
    slices=2,
    version=Version(5),
    digest=b"d" * 32,
    next_step=Step(2 * SEGMENT_STEPS + 1),
    time_ms=1_700_000_000_000,
    total_bytes=13,
    total_records=3,
    control=3,
    sealed=False,
    producers={"p": ProducerState("p", Epoch(1), b"n" * 16, 8, b"\x07", False, Version(5), 1_700_000_000_000)},
    origins=(ORIGIN,),
    first_segment=SegmentIndex(1),
    segment_refs=pack_ref(SEGMENT),
    tail=(entry(2 * SEGMENT_STEPS),),
)
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
    "lake": (
        "7374657066730101810000009eb9e61c86a46c616b65d9203031323334353637383961626364656630313233343536373839616263646566a6736c69"
        "63657302a46772696484a572616e6b7302a56d6963726f01a2637001a566696c657391a0a3657874ac2e7361666574656e736f7273a7637265617465"
        "64cf0000018bcfe56800ad636865636b5f7061796c6f6164c3"
    ),
    "data commit": (
        "737465706673020194010000718ba6a9de0011a776657273696f6e05a46c616b65d92030313233343536373839616263646566303132333435363738"
        "39616263646566a46b696e64a464617461a26964c41069696969696969696969696969696969a470726576c420646464646464646464646464646464"
        "6464646464646464646464646464646464a870726f6475636572a170a565706f636801ab696e6361726e6174696f6ec4106e6e6e6e6e6e6e6e6e6e6e"
        "6e6e6e6e6ea86e6578745f73657108a8706f736974696f6ec40107aa66697273745f7374657007a4746762739186a66f726967696e00a36b6579d92d"
        "30313233343536373839616263646566303132333435363738396162636465662f646174612f782f792e746762a473697a65cd0169a373657107a673"
        "6c69636573c43040000000000000000a0000000000000083a35f000200000080000000000000000300000000000000e9b2942a01000000a6626c6f63"
        "6b73c400a474696d65cf0000018bcfe56800a56279746573cf1000000000000000a77265636f72647318a7636f6e74726f6c03a772657469726564c2"
    ),
    "epoch commit": (
        "73746570667302010101000013f37464de0011a776657273696f6e06a46c616b65d92030313233343536373839616263646566303132333435363738"
        "39616263646566a46b696e64a565706f6368a26964c41069696969696969696969696969696969a470726576c4206464646464646464646464646464"
        "646464646464646464646464646464646464a870726f6475636572a170a565706f636802ab696e6361726e6174696f6ec4106d6d6d6d6d6d6d6d6d6d"
        "6d6d6d6d6d6da86e6578745f73657108a8706f736974696f6ec400aa66697273745f7374657008a47467627390a474696d65cf0000018bcfe56801a5"
        "62797465730da77265636f72647303a7636f6e74726f6c00a772657469726564c3"
    ),
    "origin commit": (
        "737465706673020155010000f80c4704de0012a776657273696f6e01a46c616b65d92030313233343536373839616263646566303132333435363738"
        "39616263646566a46b696e64a66f726967696ea26964c41069696969696969696969696969696969a470726576c42064646464646464646464646464"
        "64646464646464646464646464646464646464a870726f6475636572a0a565706f636800ab696e6361726e6174696f6ec41000000000000000000000"
        "000000000000a86e6578745f73657100a8706f736974696f6ec400aa66697273745f7374657009a47467627390a474696d6501a562797465730da772"
        "65636f72647303a7636f6e74726f6c00a772657469726564c2a66f726967696e85a375726cad73333a2f2f622f706172656e74a46c616b65d9206666"
        "666666666666666666666666666666666666666666666666666666666666aa736b69705f666972737404a8736b69705f656e6406a3656e6409"
    ),
    "control": (
        "737465706673050106010000c84d5fe889a46c616b65d9203031323334353637383961626364656630313233343536373839616263646566a26964c4"
        "1072727272727272727272727272727272a474696d65cf0000018bcfe56800af66697273745f6c6976655f737465700aa5666c6f6f7204ad64656c65"
        "7465645f6279746573cf1000000000000000a667726f7570739284a46e616d65d925666f726b3a656565656565656565656565656565656565656565"
        "6565656565656565656565a573746172740aa46b65707490a4666f726bab66696c653a2f2f2f6e657784a46e616d65a372756ea573746172740aa46b"
        "65707492141ea87265636f72646564921e14a66d696e696d6194040a090ca670617573657303"
    ),
    "snapshot": (
        "737465706673030163020000ce35512cde0010a46c616b65d9203031323334353637383961626364656630313233343536373839616263646566a673"
        "6c6963657302a776657273696f6e05a6646967657374c4206464646464646464646464646464646464646464646464646464646464646464a96e6578"
        "745f73746570cd0401a474696d65cf0000018bcfe56800a562797465730da77265636f72647303a7636f6e74726f6c03a67365616c6564c2af70726f"
        "64756365725f7374617465739188a26964a170a565706f636801ab696e6361726e6174696f6ec4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ea86e6578"
        "745f73657108a8706f736974696f6ec40107a772657469726564c2a776657273696f6e05a474696d65cf0000018bcfe56800a76f726967696e739185"
        "a375726cad73333a2f2f622f706172656e74a46c616b65d9206666666666666666666666666666666666666666666666666666666666666666aa736b"
        "69705f666972737404a8736b69705f656e6406a3656e6409ad66697273745f7365676d656e7401a87365676d656e7473c410ff6be5cf8b0100007373"
        "737373737373a970726f64756365727391a170a57374657073918aa776657273696f6ecd0400a474696d65cf0000018bcfe56c00a870726f64756365"
        "7200a565706f636801a66f726967696e00a36b6579d92d30313233343536373839616263646566303132333435363738396162636465662f64617461"
        "2f782f792e746762a473697a65cd0169a373657107a6736c69636573c43040000000000000000a0000000000000083a35f0002000000800000000000"
        "00000300000000000000e9b2942a01000000a6626c6f636b73c400"
    ),
    "segment": "50f86e2bb3173d79a9aa17d3032036ed84b3697f3e6734c83212db8601322bc4",
    "node": (
        "73746570667307018d000000ba878c798aa46c616b65d9203031323334353637383961626364656630313233343536373839616263646566a567726f"
        "7570a372756ea4686f7374a4686f7374a96469726563746f7279a82f6d6e742f72756ea3706964cd1267a6737465706673a5302e312e30a96e657874"
        "5f7374657009a7726561645f746f08a67761697465640ca474696d65cf0000018bcfe56800"
    ),
    "tgb": (
        "7374657066732d7467620a01000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "72496eff736c696365207a65726f00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000006f6e6500000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000073746570667306018100000073e8acfe86a46c616b65d920303132333435363738396162636465663031323334353637"
        "3839616263646566a870726f6475636572a170a565706f636801a373657107a6736c69636573c43040000000000000000a0000000000000083a35f00"
        "0200000080000000000000000300000000000000e9b2942a01000000a6626c6f636b73c400c0000000000000009100000033c708e07467622d666f6f"
        "74"
    ),
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
    return data.hex() if len(data) < 1024 else hashlib.sha256(data).hexdigest()
