"""The state of the log at one version, and the segments of old steps to which it refers.

A snapshot contains every producer's state and the digest, so recovery never needs older commits; steps older than
the last multiple of `SEGMENT_STEPS` live in immutable index segments, of which the snapshot keeps 16 bytes each
(commit time and digest of their last step). It therefore stays small: 32 KiB for 10⁶ live steps.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stepfs.errors import CorruptError
from stepfs.format.codec import Fields, Kind, decode, encode, readable
from stepfs.format.commit import COMMIT_ID_BYTES, DIGEST_BYTES, ORIGIN, Origin, genesis_digest
from stepfs.format.descriptor import Descriptor, descriptor_body, read_descriptor
from stepfs.format.ids import (
    FIRST_SEGMENT,
    FIRST_STEP,
    NO_VERSION,
    POSITION_BYTES_MAX,
    SEGMENT_STEPS,
    SLICES_MAX,
    Epoch,
    SegmentIndex,
    Step,
    Version,
)
from stepfs.format.layout import Layout, Stored, stored

_REF: Final = struct.Struct("<Q8s")
REF_BYTES: Final = _REF.size


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One committed step: its producer, its time, and the places of its slices."""

    step: Step
    version: Version
    time_ms: int
    producer_id: str
    epoch: Epoch
    tgb: Descriptor


@dataclass(frozen=True, slots=True)
class ProducerState:
    """The state that the recovery of one producer id needs; it never expires (hazard 6)."""

    producer_id: str
    epoch: Epoch
    incarnation: bytes
    next_seq: int
    position: bytes  # msgpack; b"" before the first commit
    retired: bool
    version: Version  # of its newest commit
    time_ms: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps [index * SEGMENT_STEPS, (index + 1) * SEGMENT_STEPS), complete."""

    index: SegmentIndex
    digest: bytes  # d of the version that published the last step, in a fork d_{-1}: ties the segment to one history
    entries: tuple[StepEntry, ...]


@dataclass(frozen=True, slots=True)
class LogState:
    """The log folded up to and including `version`.

    Live or not, steps [0, next_step) are committed. `tail` holds the entries from `sealed_steps` on; older ones
    are in segments, of which those from `first_segment` on are still referenced.
    """

    lake_id: str
    slices: int
    version: Version
    digest: bytes
    next_step: Step = FIRST_STEP
    time_ms: int = 0
    total_bytes: int = 0
    total_records: int = 0
    control: int = 0  # a control record that exists, from the newest commit that names one
    sealed: bool = False
    producers: Mapping[str, ProducerState] = field(default_factory=dict)
    origins: tuple[Origin, ...] = ()
    first_segment: SegmentIndex = FIRST_SEGMENT
    segment_refs: bytes = b""
    tail: tuple[StepEntry, ...] = ()

    @property
    def origin_cuts(self) -> dict[str, Step]:
        """By the id of each lake that this one was forked from, parent, its parent and so on: steps below are the same."""
        cuts = itertools.accumulate((origin.cut for origin in self.origins), min)
        return {origin.lake_id: cut for origin, cut in zip(self.origins, cuts, strict=True)}

    @property
    def sealed_segments(self) -> SegmentIndex:
        """The number of segments, dropped ones included: the index of the next one to seal."""
        return SegmentIndex(self.first_segment + len(self.segment_refs) // REF_BYTES)

    @property
    def sealed_steps(self) -> Step:
        """The first step in `tail` instead of a segment."""
        return Step(self.sealed_segments * SEGMENT_STEPS)

    def segment_ref(self, index: SegmentIndex) -> tuple[int, bytes]:
        """(commit time of its last step in ms, first 8 digest bytes) of a referenced segment; `CorruptError` below them."""
        assert index < self.sealed_segments
        if index < self.first_segment:  # the control record that gave up its steps is lost
            raise CorruptError(f"segment {index} was reclaimed, but no control record says so: run `stepfs verify`")
        time_ms, digest = _REF.unpack_from(self.segment_refs, (index - self.first_segment) * REF_BYTES)
        return time_ms, digest

    def trimmed(self, first_live_step: Step) -> LogState:
        """The state without references to segments that hold no live step."""
        first = SegmentIndex(min(first_live_step // SEGMENT_STEPS, self.sealed_segments))
        if first <= self.first_segment:
            return self
        kept = self.segment_refs[(first - self.first_segment) * REF_BYTES :]
        return replace(self, first_segment=first, segment_refs=kept)


def genesis(lake_id: str, slices: int) -> LogState:
    """The state before the first commit."""
    return LogState(lake_id, slices, NO_VERSION, genesis_digest(lake_id))


def pack_ref(segment: Segment) -> bytes:
    """The 16 bytes by which a snapshot refers to a segment."""
    return _REF.pack(segment.entries[-1].time_ms, segment.digest[:8])


def _read_producers(fields: Fields, name: str) -> dict[str, ProducerState]:
    states = map(_PRODUCER.read, fields.maps(name))
    return {state.producer_id: state for state in states}


def entry_layout(producer: Stored) -> Layout[StepEntry]:
    """An entry beside its step, which follows from its place, and its descriptor."""
    return Layout(
        StepEntry,
        version=stored("version", Fields.integer),
        time_ms=stored("time", Fields.integer),
        producer_id=producer,
        epoch=stored("epoch", Fields.integer),
    )


_PRODUCER: Final = Layout(
    ProducerState,
    producer_id=stored("id", Fields.text),
    epoch=stored("epoch", Fields.integer),
    incarnation=stored("incarnation", Fields.binary, size=COMMIT_ID_BYTES),
    next_seq=stored("next_seq", Fields.integer),
    position=stored("position", Fields.binary, size_max=POSITION_BYTES_MAX),
    retired=stored("retired", Fields.boolean),
    version=stored("version", Fields.integer),
    time_ms=stored("time", Fields.integer),
)
_STATE: Final = Layout(  # beside the tail
    LogState,
    lake_id=stored("lake", Fields.text),
    slices=stored("slices", Fields.integer, low=1, high=SLICES_MAX),
    version=stored("version", Fields.integer),
    digest=stored("digest", Fields.binary, size=DIGEST_BYTES),
    next_step=stored("next_step", Fields.integer),
    time_ms=stored("time", Fields.integer),
    total_bytes=stored("bytes", Fields.total),
    total_records=stored("records", Fields.total),
    control=stored("control", Fields.integer),
    sealed=stored("sealed", Fields.boolean),
    producers=Stored(
        "producer_states",
        _read_producers,
        lambda producers: [_PRODUCER.body(state) for _, state in sorted(producers.items())],
    ),
    origins=ORIGIN.several("origins", 255),
    first_segment=stored("first_segment", Fields.integer),
    segment_refs=stored("segments", Fields.binary),
)


def encode_segment(lake_id: str, segment: Segment) -> bytes:
    """Segment → the bytes of its index object. `RefusedError` if readers would not accept them."""
    assert len(segment.entries) == SEGMENT_STEPS
    body = {"lake": lake_id, "index": segment.index, "digest": segment.digest}
    data = encode(Kind.SEGMENT, body | _entries_body(segment.entries))
    return readable(Kind.SEGMENT, data, (lake_id, segment), decode_segment)


def decode_segment(data: bytes, what: str) -> tuple[str, Segment]:
    """The bytes of an index object → (lake id, segment)."""
    fields = decode(Kind.SEGMENT, data, what)
    index = SegmentIndex(fields.integer("index"))
    entries = _read_entries(fields, Step(index * SEGMENT_STEPS))
    if len(entries) != SEGMENT_STEPS:
        raise CorruptError(f"{what}: {len(entries)} steps in a segment of {SEGMENT_STEPS}")
    return fields.text("lake"), Segment(index, fields.binary("digest", size=DIGEST_BYTES), entries)


def encode_snapshot(state: LogState) -> bytes:
    """State → the bytes of its snapshot object. `RefusedError` if readers would not accept them."""
    data = encode(Kind.SNAPSHOT, _STATE.body(state) | _entries_body(state.tail))
    return readable(Kind.SNAPSHOT, data, state, decode_snapshot)


def decode_snapshot(data: bytes, what: str) -> LogState:
    """The bytes of a snapshot object → state; `CorruptError` unless its parts agree with each other."""
    fields = decode(Kind.SNAPSHOT, data, what)
    state = _STATE.read(fields)
    tail = _read_entries(fields, state.sealed_steps)
    refs = len(state.segment_refs)
    if refs % REF_BYTES or state.sealed_steps + len(tail) != state.next_step:
        raise CorruptError(f"{what}: {refs} reference bytes and {len(tail)} steps do not end at {state.next_step}")
    return replace(state, tail=tail)


def _entries_body(entries: Sequence[StepEntry]) -> dict[str, object]:
    """The names of producers, each once, and the entries with numbers of them."""
    producers = sorted({entry.producer_id for entry in entries})
    numbers = {producer: number for number, producer in enumerate(producers)}
    layout = entry_layout(Stored("producer", Fields.integer, numbers.__getitem__))
    return {
        "producers": producers,
        "steps": [layout.body(entry) | descriptor_body(entry.tgb) for entry in entries],
    }


def _read_entries(fields: Fields, first_step: Step) -> tuple[StepEntry, ...]:
    producers = fields.texts("producers")

    def named(item: Fields, name: str) -> str:
        number = item.integer(name)
        if number >= len(producers):
            raise CorruptError(f"{item.what}: names producer {number} of {len(producers)}")
        return producers[number]

    layout = entry_layout(Stored("producer", named))
    items = enumerate(fields.maps("steps"), first_step)
    return tuple(layout.read(item, step=step, tgb=read_descriptor(item)) for step, item in items)
