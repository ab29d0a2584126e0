"""Totals of any size and the limits of a lake: every object that is written can be read again, or is refused before."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from t0_pure.test_rebase import LAKE, ME, STAMP, durable, fresh

from stepfs.errors import CorruptError, RefusedError, UsageError
from stepfs.format import codec
from stepfs.format.codec import Kind
from stepfs.format.commit import Commit, decode_commit, encode_commit
from stepfs.format.control import ControlRecord, decode_control, encode_control
from stepfs.format.grid import Grid
from stepfs.format.ids import (
    DESCRIPTOR_BYTES_MAX,
    ID_BYTES_MAX,
    INTEGER_MAX,
    PRODUCERS_MAX,
    RECORDS_MAX,
    SEGMENT_STEPS,
    SLICES_MAX,
    TOTAL_MAX,
    Epoch,
    Step,
    Version,
)
from stepfs.format.snapshot import LogState, ProducerState, decode_snapshot, encode_snapshot, genesis
from stepfs.format.tgb import Descriptor, SliceRef, descriptor_body, pack_slices
from stepfs.lake.log.apply import rehearsed
from stepfs_producer.commit.rebase import POSITIONS_BYTES_MAX, NothingLeft, Stamp, rebase, rebase_start
from stepfs_producer.commit.uploads import check_records, freeze

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
        f"p{n}": ProducerState(f"p{n}", Epoch(1), b"i" * 16, 0, position, False, Version(n), 1000) for n in range(count)
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
    assert len(body) < 100 * PRODUCERS_MAX, "what a lake pays for each id, beside its position"


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
