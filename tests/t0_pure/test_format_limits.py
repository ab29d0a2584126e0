"""What the limits of a lake promise: at all of them, every object that is written can be read again."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from stepfs.errors import RefusedError
from stepfs.format import codec
from stepfs.format.descriptor import Descriptor, SliceRef, descriptor_body, pack_slices
from stepfs.format.ids import ID_BYTES_MAX, PRODUCERS_MAX, SEGMENT_STEPS, SLICES_MAX, Epoch, Version
from stepfs.format.snapshot import LogState, ProducerState, decode_snapshot, encode_snapshot, genesis
from stepfs_producer.rebase import POSITIONS_BYTES_MAX, NothingLeft, Stamp, rebase_start

STAMP = Stamp(b"c" * 16, 1000)
OVERHEAD_BYTES = 8 << 20  # keys, names, references


def crowd(count: int, position: bytes = b"") -> LogState:
    producers = {
        f"p{n}": ProducerState(f"p{n}", Epoch(1), b"i" * 16, 0, position, False, Version(n), 1000)
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
    assert len(body) < 100 * PRODUCERS_MAX, "what a lake pays for each id, beside its position"


def test_one_producer_id_more_is_refused_and_a_known_one_is_not() -> None:
    full = crowd(PRODUCERS_MAX)
    with pytest.raises(RefusedError, match=r"16384 producer ids.*use ids again"):
        rebase_start(full, "another", b"n" * 16, STAMP)
    assert not isinstance(rebase_start(full, "p7", b"n" * 16, STAMP), NothingLeft)
    with pytest.raises(RefusedError, match="bytes of positions"):
        rebase_start(crowd(600, bytes(64 << 10)), "another", b"n" * 16, STAMP)


def test_an_object_that_no_reader_would_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "OBJECT_BYTES_MAX", 100)
    with pytest.raises(RefusedError, match=r"a snapshot of .* is not written"):
        encode_snapshot(crowd(3))
