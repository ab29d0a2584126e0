"""Hypothesis strategies for the values that the format rooms encode."""

from __future__ import annotations

from hypothesis import strategies as st

from stepfs.format import tgb as tgb_format
from stepfs.format.commit import Commit, CommitKind, Origin
from stepfs.format.ids import INTEGER_MAX, Epoch, Step, Version
from stepfs.format.keys import data_key, new_lake_id
from stepfs.format.tgb import Descriptor

numbers = st.integers(0, INTEGER_MAX)
ids = st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable())
payload_lists = st.lists(st.binary(max_size=300), min_size=1, max_size=6)


@st.composite
def descriptors(draw: st.DrawFn, slices: int | None = None) -> Descriptor:
    payloads = draw(
        payload_lists if slices is None else st.lists(st.binary(max_size=99), min_size=slices, max_size=slices)
    )
    lake_id, producer_id = new_lake_id(), draw(ids)
    epoch, seq = Epoch(draw(st.integers(1, 10**6))), draw(st.integers(0, 10**9))
    image = tgb_format.build(
        lake_id=lake_id, producer_id=producer_id, epoch=epoch, seq=seq, payloads=payloads,
        records=[draw(st.integers(0, 99)) for _ in payloads],
    )  # fmt: skip
    key = data_key(lake_id, producer_id, epoch, seq)
    return Descriptor(draw(st.integers(0, 3)), key, image.size, seq, image.packed_slices, image.packed_blocks)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    kind = draw(st.sampled_from(CommitKind))
    data = kind is CommitKind.DATA
    return Commit(
        version=Version(draw(numbers)),
        lake_id=new_lake_id(),
        kind=kind,
        commit_id=draw(st.binary(min_size=16, max_size=16)),
        prev_digest=draw(st.binary(min_size=32, max_size=32)),
        producer_id=draw(ids),
        epoch=Epoch(draw(numbers)),
        incarnation=draw(st.binary(min_size=16, max_size=16)),
        next_seq=draw(numbers),
        position=draw(st.binary(max_size=99)),
        first_step=Step(draw(numbers)),
        tgbs=tuple(draw(st.lists(descriptors(), min_size=1, max_size=3))) if data else (),
        time_ms=draw(numbers),
        total_bytes=draw(numbers),
        total_records=draw(numbers),
        retired=draw(st.booleans()),
        origin=Origin(draw(ids), new_lake_id(), Step(3), Step(5), Step(9)) if kind is CommitKind.ORIGIN else None,
    )
