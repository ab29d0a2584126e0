"""A second copy of a segment's entries, each readable alone: one small ranged GET per step opened out of order.

A segment has one checksum for all of its 512 steps, so a reader that wants one step must read 0.9 MB (64 slices).
Here each entry is an envelope of its own (magic, version, length, CRC32C), padded to a stride that follows from the
lake's number of slices. A reader computes the place of the entry and needs no table. An entry that is longer than the
stride (block checksums of large slices, long ids) stands behind the last place; its place then points to it.

Each record names its lake, its step and the first bytes of its segment's digest, so it is as reliable as the segment.

Rejected: a table of offsets into the segment (one more request for the first step of each segment, and it fits only
the bytes that its own writer encoded).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stepfs.errors import CorruptError
from stepfs.format.codec import (
    HEADER_BYTES,
    OBJECT_BYTES_MAX,
    Fields,
    Kind,
    decode,
    encode,
    envelope_bytes,
)
from stepfs.format.descriptor import SLICE_ENTRY_BYTES, descriptor_body, read_descriptor
from stepfs.format.ids import DESCRIPTOR_BYTES_MAX, SEGMENT_STEPS, Step
from stepfs.format.layout import stored
from stepfs.format.snapshot import Segment, StepEntry, entry_layout

DIGEST_BYTES: Final = 8
_ENTRY: Final = entry_layout(stored("producer", Fields.text))
_FIXED_BYTES: Final = 512  # everything but the slices: key, names of fields, producer id
_ALIGNMENT_BYTES: Final = 64
_RECORD_BYTES_MAX: Final = DESCRIPTOR_BYTES_MAX + (8 << 10)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One entry, with its lake and history."""

    lake_id: str
    digest: bytes  # first 8 bytes of the segment's digest
    entry: StepEntry


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The record is longer than its place: bytes [offset, offset + size) of the object."""

    offset: int
    size: int


def stride_bytes(slices: int) -> int:
    """Bytes from one record to the next in a lake of so many slices a step."""
    return -(-(_FIXED_BYTES + SLICE_ENTRY_BYTES * slices) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def place_of(step: Step, slices: int) -> int:
    """Offset of the record of `step`."""
    return step % SEGMENT_STEPS * stride_bytes(slices)


def encode_step_records(lake_id: str, slices: int, segment: Segment) -> bytes | None:
    """Segment → the bytes of its `entries/` object; None if it would be too large for readers."""
    stride = stride_bytes(slices)
    places: list[bytes] = []
    behind: list[bytes] = []
    end = SEGMENT_STEPS * stride
    for entry in segment.entries:
        record = _encode_record(StepRecord(lake_id, segment.digest[:DIGEST_BYTES], entry))
        if len(record) > stride:
            behind.append(record)
            record, end = encode(Kind.STEP_ENTRY, {"at": end, "size": len(record)}), end + len(record)
        places.append(record.ljust(stride, b"\0"))
    return b"".join(places + behind) if end <= OBJECT_BYTES_MAX else None


def decode_step_record(data: bytes | memoryview, what: str) -> StepRecord | Elsewhere:
    """Decode the bytes at a step's place, or of a record elsewhere; bytes after the record are ignored.
    `CorruptError`."""
    size = envelope_bytes(data, what)
    fields = decode(Kind.STEP_ENTRY, data[:size], what)
    if "at" in fields:
        return Elsewhere(
            fields.integer("at", high=OBJECT_BYTES_MAX),
            fields.integer("size", low=HEADER_BYTES, high=_RECORD_BYTES_MAX),
        )
    entry = _ENTRY.read(fields, step=Step(fields.integer("step")), tgb=read_descriptor(fields))
    return StepRecord(fields.text("lake"), fields.binary("digest", size=DIGEST_BYTES), entry)


def decode_step_records(data: bytes, slices: int, what: str) -> Iterator[StepRecord]:
    """Every record of an `entries/` object, in the order of steps; `CorruptError` at the first byte that is damaged."""
    stride = stride_bytes(slices)
    end = SEGMENT_STEPS * stride
    for number in range(SEGMENT_STEPS):
        name = f"{what}: entry {number}"
        place = memoryview(data)[number * stride : (number + 1) * stride]
        found = decode_step_record(place, name)
        if any(place[envelope_bytes(place, name) :]) or len(place) < stride:
            raise CorruptError(f"{name}: is not followed by zeros")
        if isinstance(found, Elsewhere):
            end = found.offset + found.size
            found = decode_step_record(memoryview(data)[found.offset : end], name)
        if isinstance(found, Elsewhere):
            raise CorruptError(f"{name}: points at a place that points on")
        yield found
    if len(data) != end:
        raise CorruptError(f"{what}: {len(data)} bytes for entries that end at {end}")


def _encode_record(record: StepRecord) -> bytes:
    body = {"lake": record.lake_id, "digest": record.digest, "step": record.entry.step}
    return encode(Kind.STEP_ENTRY, body | _ENTRY.body(record.entry) | descriptor_body(record.entry.tgb))
