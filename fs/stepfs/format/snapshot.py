"""The state of the log at one version, and the segments of old steps to which it refers.

A snapshot has every producer's state, so recovery needs no older commit. A segment is read whole, or one entry of it by
one ranged GET.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stepfs.errors import CorruptError
from stepfs.format import ids
from stepfs.format.codec import (
    HEADER_BYTES,
    Fields,
    Kind,
    Later,
    Layout,
    Stored,
    decode,
    encode,
    envelope_bytes,
    readable,
    stored,
)
from stepfs.format.commit import COMMIT_ID_BYTES, DIGEST_BYTES, ORIGIN, Origin, genesis_digest
from stepfs.format.tgb import SLICE_ENTRY_BYTES, Descriptor, descriptor_body, read_descriptor

_REF: Final = struct.Struct("<Q8s")
REF_BYTES: Final = _REF.size
SEGMENT_DIGEST_BYTES: Final = 8
_FIXED_BYTES: Final = 512  # of a record, beside its slices: key, names of fields, producer id
_ALIGNMENT_BYTES: Final = 64
_RECORD_BYTES_MAX: Final = ids.DESCRIPTOR_BYTES_MAX + (8 << 10)


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One committed step: its producer, its time, and the places of its slices."""

    step: ids.Step
    version: ids.Version
    time_ms: int
    producer_id: str
    epoch: ids.Epoch
    tgb: Descriptor


@dataclass(frozen=True, slots=True)
class ProducerState:
    """The state that the recovery of one producer id needs; it never expires (hazard 6)."""

    producer_id: str
    epoch: ids.Epoch
    incarnation: bytes
    next_seq: int
    position: bytes  # msgpack; b"" before the first commit
    retired: bool
    version: ids.Version  # of its newest commit
    time_ms: int
    writer: str = ""  # the program of the newest incarnation
    later: Later = field(default=(), hash=False)


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps [index * SEGMENT_STEPS, (index + 1) * SEGMENT_STEPS), complete."""

    index: ids.SegmentIndex
    digest: bytes  # first 8 bytes of d of the version that published the last step, in a fork d_{-1}: of one history
    entries: tuple[StepEntry, ...]


@dataclass(frozen=True, slots=True)
class LogState:
    """The log folded up to and including `version`.

    Live or not, steps [0, next_step) are committed. `tail` holds the entries from `sealed_steps` on; older ones
    are in segments, of which those from `first_segment` on are still referenced.
    """

    lake_id: str
    slices: int
    version: ids.Version
    digest: bytes
    next_step: ids.Step = ids.FIRST_STEP
    time_ms: int = 0
    total_bytes: int = 0
    total_records: int = 0
    control: int = 0  # a control record that exists, from the newest commit that names one
    sealed: bool = False
    producers: Mapping[str, ProducerState] = field(default_factory=dict)
    origins: tuple[Origin, ...] = ()
    first_segment: ids.SegmentIndex = ids.FIRST_SEGMENT
    segment_refs: bytes = b""
    tail: tuple[StepEntry, ...] = ()
    later: Later = ()

    @property
    def origin_cuts(self) -> dict[str, ids.Step]:
        """The lakes that this one was forked from, by id, parent first: their steps below the number are the same."""
        cuts = itertools.accumulate((origin.cut for origin in self.origins), min)
        return {origin.lake_id: cut for origin, cut in zip(self.origins, cuts, strict=True)}

    @property
    def sealed_segments(self) -> ids.SegmentIndex:
        """The number of segments, dropped ones included: the index of the next one to seal."""
        return ids.SegmentIndex(self.first_segment + len(self.segment_refs) // REF_BYTES)

    @property
    def sealed_steps(self) -> ids.Step:
        """The first step in `tail` instead of a segment."""
        return ids.Step(self.sealed_segments * ids.SEGMENT_STEPS)

    def segment_ref(self, index: ids.SegmentIndex) -> tuple[int, bytes]:
        """(commit time of its last step in ms, first 8 digest bytes) of a referenced segment; `CorruptError` below them."""
        assert index < self.sealed_segments
        if index < self.first_segment:  # the control record that gave up its steps is lost
            raise CorruptError(f"segment {index} was reclaimed, but no control record says so: run `stepfs verify`")
        time_ms, digest = _REF.unpack_from(self.segment_refs, (index - self.first_segment) * REF_BYTES)
        return time_ms, digest

    def trimmed(self, first_live_step: ids.Step) -> LogState:
        """The state without references to segments that hold no live step."""
        first = ids.SegmentIndex(min(first_live_step // ids.SEGMENT_STEPS, self.sealed_segments))
        if first <= self.first_segment:
            return self
        kept = self.segment_refs[(first - self.first_segment) * REF_BYTES :]
        return replace(self, first_segment=first, segment_refs=kept)


def genesis(lake_id: str, slices: int) -> LogState:
    """The state before the first commit."""
    return LogState(lake_id, slices, ids.NO_VERSION, genesis_digest(lake_id))


def pack_ref(segment: Segment) -> bytes:
    """The 16 bytes by which a snapshot refers to a segment."""
    return _REF.pack(segment.entries[-1].time_ms, segment.digest)


def stride_bytes(slices: int) -> int:
    """Bytes from one record to the next in a lake of so many slices a step."""
    return -(-(_FIXED_BYTES + SLICE_ENTRY_BYTES * slices) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


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


SEGMENT_BYTES_MAX: Final = ids.SEGMENT_STEPS * (stride_bytes(ids.SLICES_MAX) + _RECORD_BYTES_MAX)
_RECORD: Final = entry_layout(stored("producer", Fields.text))
_PRODUCER: Final = Layout(
    ProducerState,
    producer_id=stored("id", Fields.text),
    epoch=stored("epoch", Fields.integer),
    incarnation=stored("incarnation", Fields.binary, size=COMMIT_ID_BYTES),
    next_seq=stored("next_seq", Fields.integer),
    position=stored("position", Fields.binary, size_max=ids.POSITION_BYTES_MAX),
    retired=stored("retired", Fields.boolean),
    version=stored("version", Fields.integer),
    time_ms=stored("time", Fields.integer),
    writer=stored("writer", Fields.text),
)
_STATE: Final = Layout(
    LogState,
    ("producers", "steps"),  # of the tail
    lake_id=stored("lake", Fields.text),
    slices=stored("slices", Fields.integer, low=1, high=ids.SLICES_MAX),
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


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One entry of a segment's object, with its lake and history."""

    lake_id: str
    digest: bytes  # of the segment
    entry: StepEntry


@dataclass(frozen=True, slots=True)
class OverflowPointer:
    """A record that is longer than its place: bytes [offset, offset + size) of the object."""

    offset: int
    size: int


def place_of(step: ids.Step, slices: int) -> int:
    """Offset of the record of `step` in its segment's object."""
    return step % ids.SEGMENT_STEPS * stride_bytes(slices)


def encode_segment(lake_id: str, slices: int, segment: Segment) -> bytes:
    """Segment → the bytes of its index object. `RefusedError` if readers would not accept them."""
    assert len(segment.entries) == ids.SEGMENT_STEPS
    stride = stride_bytes(slices)
    places: list[bytes] = []
    behind: list[bytes] = []
    end = ids.SEGMENT_STEPS * stride
    for entry in segment.entries:
        body = {"lake": lake_id, "digest": segment.digest, "step": entry.step}
        record = encode(Kind.STEP_ENTRY, body | _RECORD.body(entry) | descriptor_body(entry.tgb))
        if len(record) > stride:
            behind.append(record)
            record, end = encode(Kind.STEP_ENTRY, {"at": end, "size": len(record)}), end + len(record)
        places.append(record.ljust(stride, b"\0"))

    def decoder(data: bytes, what: str) -> tuple[str, Segment]:
        return decode_segment(data, slices, what)

    return readable(Kind.STEP_ENTRY, b"".join(places + behind), (lake_id, segment), decoder)


def decode_segment(data: bytes, slices: int, what: str) -> tuple[str, Segment]:
    """The bytes of an index object → (lake id, segment). `CorruptError` for any byte that is not as it was written."""
    stride, view = stride_bytes(slices), memoryview(data)
    end = ids.SEGMENT_STEPS * stride
    records = []
    for number in range(ids.SEGMENT_STEPS):
        place = view[number * stride : (number + 1) * stride]
        found = decode_step_record(place, what)
        if len(place) < stride or bytes(place[envelope_bytes(place, what) :]).strip(b"\0"):
            raise CorruptError(f"{what}: entry {number} is not followed by zeros")
        if isinstance(found, OverflowPointer):
            if found.offset != end:
                raise CorruptError(f"{what}: entry {number} points to byte {found.offset}, not {end}")
            end += found.size
            found = decode_step_record(view[found.offset : end], what)
        if isinstance(found, OverflowPointer):
            raise CorruptError(f"{what}: entry {number} points at a place that points on")
        records.append(found)
    if len(data) != end:
        raise CorruptError(f"{what}: {len(data)} bytes for entries that end at {end}")
    first = records[0]
    for step, record in enumerate(records, first.entry.step):
        if (record.lake_id, record.digest, record.entry.step) != (first.lake_id, first.digest, step):
            raise CorruptError(f"{what}: holds step {record.entry.step} in the place of step {step}")
    index, rest = divmod(first.entry.step, ids.SEGMENT_STEPS)
    if rest:
        raise CorruptError(f"{what}: holds step {first.entry.step} in the place of step {first.entry.step - rest}")
    return first.lake_id, Segment(ids.SegmentIndex(index), first.digest, tuple(record.entry for record in records))


def decode_step_record(data: bytes | memoryview, what: str) -> StepRecord | OverflowPointer:
    """The bytes at a step's place, or of a record elsewhere; bytes after the record are ignored. `CorruptError`."""
    fields = decode(Kind.STEP_ENTRY, data[: envelope_bytes(data, what)], what)
    if "at" in fields:
        return OverflowPointer(
            fields.integer("at", high=SEGMENT_BYTES_MAX),
            fields.integer("size", low=HEADER_BYTES, high=_RECORD_BYTES_MAX),
        )
    entry = _RECORD.read(fields, step=ids.Step(fields.integer("step")), tgb=read_descriptor(fields))
    return StepRecord(fields.text("lake"), fields.binary("digest", size=SEGMENT_DIGEST_BYTES), entry)


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
    return {"producers": producers, "steps": [layout.body(entry) | descriptor_body(entry.tgb) for entry in entries]}


def _read_entries(fields: Fields, first_step: ids.Step) -> tuple[StepEntry, ...]:
    producers = fields.texts("producers")

    def named(item: Fields, name: str) -> str:
        number = item.integer(name)
        if number >= len(producers):
            raise CorruptError(f"{item.what}: names producer {number} of {len(producers)}")
        return producers[number]

    layout = entry_layout(Stored("producer", named))
    items = enumerate(fields.maps("steps"), first_step)
    return tuple(layout.read(item, step=step, tgb=read_descriptor(item)) for step, item in items)
