"""The state of the log at one version, and the segments of old steps to which it refers.

A snapshot contains every producer's state and the digest, so recovery never needs older commits; steps older than
the last multiple of `SEGMENT_STEPS` live in immutable index segments, of which the snapshot keeps 16 bytes each
(commit time and digest of their last step). It therefore stays small: 32 KiB for 10⁶ live steps.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stepfs.errors import CorruptError
from stepfs.format.codec import Fields, Kind, decode, encode, readable
from stepfs.format.commit import (
    COMMIT_ID_BYTES,
    DIGEST_BYTES,
    Origin,
    genesis_digest,
    origin_body,
    read_origin,
)
from stepfs.format.descriptor import Descriptor, descriptor_body, read_descriptor
from stepfs.format.ids import (
    NO_VERSION,
    POSITION_BYTES_MAX,
    SEGMENT_STEPS,
    SLICES_MAX,
    Epoch,
    SegmentIndex,
    Step,
    Version,
)

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
    digest: bytes  # d_v of the version that published the last step: ties the segment to one history
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
    next_step: Step
    time_ms: int
    total_bytes: int
    total_records: int
    control: int  # a control record that exists, from the newest commit that names one
    sealed: bool
    producers: Mapping[str, ProducerState]
    origins: tuple[Origin, ...]
    first_segment: SegmentIndex
    segment_refs: bytes
    tail: tuple[StepEntry, ...]

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
            raise CorruptError(
                f"segment {index} was reclaimed, but no control record says so: run `stepfs verify`"
            )
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
    return LogState(
        lake_id=lake_id,
        slices=slices,
        version=NO_VERSION,
        digest=genesis_digest(lake_id),
        next_step=Step(0),
        time_ms=0,
        total_bytes=0,
        total_records=0,
        control=0,
        sealed=False,
        producers={},
        origins=(),
        first_segment=SegmentIndex(0),
        segment_refs=b"",
        tail=(),
    )


def pack_ref(segment: Segment) -> bytes:
    """The 16 bytes by which a snapshot refers to a segment."""
    return _REF.pack(segment.entries[-1].time_ms, segment.digest[:8])


def encode_segment(lake_id: str, segment: Segment) -> bytes:
    """Segment → the bytes of its index object. `RefusedError` if readers would not accept them."""
    assert len(segment.entries) == SEGMENT_STEPS
    producers = sorted({entry.producer_id for entry in segment.entries})
    data = encode(
        Kind.SEGMENT,
        {
            "lake": lake_id,
            "index": segment.index,
            "digest": segment.digest,
            "producers": producers,
            "steps": _entry_bodies(segment.entries, producers),
        },
    )
    return readable(Kind.SEGMENT, data, (lake_id, segment), decode_segment)


def decode_segment(data: bytes, what: str) -> tuple[str, Segment]:
    """The bytes of an index object → (lake id, segment)."""
    fields = decode(Kind.SEGMENT, data, what)
    index = SegmentIndex(fields.integer("index"))
    entries = _read_entries(fields, Step(index * SEGMENT_STEPS), what)
    if len(entries) != SEGMENT_STEPS:
        raise CorruptError(f"{what}: {len(entries)} steps in a segment of {SEGMENT_STEPS}")
    return fields.text("lake"), Segment(index, fields.binary("digest", size=DIGEST_BYTES), entries)


def encode_snapshot(state: LogState) -> bytes:
    """State → the bytes of its snapshot object. `RefusedError` if readers would not accept them."""
    producers = sorted({entry.producer_id for entry in state.tail})
    data = encode(
        Kind.SNAPSHOT,
        {
            "lake": state.lake_id,
            "slices": state.slices,
            "version": state.version,
            "digest": state.digest,
            "next_step": state.next_step,
            "time": state.time_ms,
            "bytes": state.total_bytes,
            "records": state.total_records,
            "control": state.control,
            "sealed": state.sealed,
            "producer_states": [_producer_body(p) for _, p in sorted(state.producers.items())],
            "origins": [origin_body(origin) for origin in state.origins],
            "first_segment": state.first_segment,
            "segments": state.segment_refs,
            "producers": producers,
            "steps": _entry_bodies(state.tail, producers),
        },
    )
    return readable(Kind.SNAPSHOT, data, state, decode_snapshot)


def decode_snapshot(data: bytes, what: str) -> LogState:
    """The bytes of a snapshot object → state; `CorruptError` unless its parts agree with each other."""
    fields = decode(Kind.SNAPSHOT, data, what)
    refs = fields.binary("segments")
    first_segment = SegmentIndex(fields.integer("first_segment"))
    next_step = Step(fields.integer("next_step"))
    sealed_steps = Step((first_segment + len(refs) // REF_BYTES) * SEGMENT_STEPS)
    tail = _read_entries(fields, sealed_steps, what)
    if len(refs) % REF_BYTES or sealed_steps + len(tail) != next_step:
        raise CorruptError(
            f"{what}: {len(refs)} reference bytes and {len(tail)} steps do not end at {next_step}"
        )
    producers = [_read_producer(item) for item in fields.maps("producer_states")]
    return LogState(
        lake_id=fields.text("lake"),
        slices=fields.integer("slices", low=1, high=SLICES_MAX),
        version=Version(fields.integer("version")),
        digest=fields.binary("digest", size=DIGEST_BYTES),
        next_step=next_step,
        time_ms=fields.integer("time"),
        total_bytes=fields.total("bytes"),
        total_records=fields.total("records"),
        control=fields.integer("control"),
        sealed=fields.boolean("sealed"),
        producers={producer.producer_id: producer for producer in producers},
        origins=tuple(read_origin(item) for item in fields.maps("origins", items_max=255)),
        first_segment=first_segment,
        segment_refs=refs,
        tail=tail,
    )


def _entry_bodies(entries: Sequence[StepEntry], producers: list[str]) -> list[dict[str, object]]:
    number_of = {producer: number for number, producer in enumerate(producers)}
    return [
        {
            "version": entry.version,
            "time": entry.time_ms,
            "producer": number_of[entry.producer_id],
            "epoch": entry.epoch,
            **descriptor_body(entry.tgb),
        }
        for entry in entries
    ]


def _read_entries(fields: Fields, first_step: Step, what: str) -> tuple[StepEntry, ...]:
    producers = fields.texts("producers")
    entries = []
    for offset, item in enumerate(fields.maps("steps")):
        number = item.integer("producer")
        if number >= len(producers):
            raise CorruptError(
                f"{what}: step {first_step + offset} names producer {number} of {len(producers)}"
            )
        entries.append(
            StepEntry(
                step=Step(first_step + offset),
                version=Version(item.integer("version")),
                time_ms=item.integer("time"),
                producer_id=producers[number],
                epoch=Epoch(item.integer("epoch")),
                tgb=read_descriptor(item, what),
            )
        )
    return tuple(entries)


def _producer_body(producer: ProducerState) -> dict[str, object]:
    return {
        "id": producer.producer_id,
        "epoch": producer.epoch,
        "incarnation": producer.incarnation,
        "next_seq": producer.next_seq,
        "position": producer.position,
        "retired": producer.retired,
        "version": producer.version,
        "time": producer.time_ms,
    }


def _read_producer(fields: Fields) -> ProducerState:
    return ProducerState(
        producer_id=fields.text("id"),
        epoch=Epoch(fields.integer("epoch")),
        incarnation=fields.binary("incarnation", size=COMMIT_ID_BYTES),
        next_seq=fields.integer("next_seq"),
        position=fields.binary("position", size_max=POSITION_BYTES_MAX),
        retired=fields.boolean("retired"),
        version=Version(fields.integer("version")),
        time_ms=fields.integer("time"),
    )
