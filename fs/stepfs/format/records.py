"""The three small records beside the log: lake identity, reclaim floor, consumer group."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from stepfs.errors import CorruptError, UsageError
from stepfs.format.arguments import check_text
from stepfs.format.codec import Kind, Value, decode, encode, readable
from stepfs.format.ids import ID_BYTES_MAX, SLICES_MAX, Step, Version
from stepfs.format.payload.schema import SCHEMA_BYTES_MAX

RECORD_ID_BYTES: Final = 16
KEPT_CHECKPOINTS_MAX: Final = 4096
TOMBSTONES_MAX: Final = 4096  # listed in one floor record: 96 KiB
GRACE_MS_DEFAULT: Final = 3_600_000
_TOMBSTONE: Final = struct.Struct("<16sQ")
_EXT: Final = re.compile(r"^(\.[A-Za-z0-9_-]{1,15}){1,3}$")
_NOT_KNOWN: Final = Step(0)
_LAKE_ID: Final = re.compile(r"^[0-9a-f]{32}$")


@dataclass(frozen=True, slots=True)
class LakeIdentity:
    """`lake.msgpack`: written once; everything else of the lake lives under its random id."""

    lake_id: str
    slices: int
    ext: str
    created_ms: int
    check_payload: bool = False  # slices are files of kind `ext`: producers and `verify --content` check it
    payload_schema: str | None = None  # what slices hold, as `format/payload/schema.py` reads it


@dataclass(frozen=True, slots=True)
class FloorRecord:
    """A slot of `floor/`. A closing record (closing > first_live_step) announces; the next one advances."""

    record_id: bytes  # random: distinguishes two reclaimers
    floor: Version  # lowest log version that may still exist
    first_live_step: Step
    closing: Step  # no group may start to need a step below this
    deleted_bytes: int  # payload bytes reclaimed so far
    time_ms: int
    grace_ms: int = GRACE_MS_DEFAULT  # how long a superseded group record counts for its reclaimer
    swept_epochs: int = 0  # `plan.epochs` of the state at the last search for orphans; 0: never
    swept_ms: int = 0  # the time of that search
    tombstones: Mapping[str, int] = field(
        default_factory=dict
    )  # newest slots of retired groups, by directory
    tombstones_at: int = -1  # the floor record that lists them, if it is not this one

    @property
    def grace_s(self) -> float:
        return self.grace_ms / 1000


@dataclass(frozen=True, slots=True)
class ConsumerRecord:
    """A slot of `consumers/<group>/`: the whole set of kept checkpoints, so older slots are never needed."""

    record_id: bytes
    group: str
    kept: tuple[Step, ...]  # `next` of every kept, durable checkpoint, ascending, distinct
    start: Step  # the need while nothing is kept: the first step that was not being reclaimed at registration
    retired: bool
    time_ms: int
    recorded: tuple[Step, ...] = ()  # `kept` in the order of recording; empty when that is ascending
    opened: Step = _NOT_KNOWN  # one past the greatest step that a reader of the group has opened

    @property
    def need(self) -> Step:
        """First step this group may still read. Meaningless when retired."""
        return min(self.kept, default=self.start)

    @property
    def order(self) -> tuple[Step, ...]:
        """The kept checkpoints in the order of recording, the newest last."""
        return self.recorded or self.kept


def check_ext(ext: str) -> str:
    """A file extension such as `.pt` or `.tar.gz`; `UsageError` otherwise."""
    if not _EXT.fullmatch(ext):
        raise UsageError(f"extension {ext!r}: use a dot and letters or digits, such as .safetensors or .npy")
    return ext


def check_id(identifier: str, what: str) -> str:
    """A producer or group id: 1 to 256 bytes of printable UTF-8."""
    size = len(check_text(identifier, what, "run-0").encode(errors="surrogatepass"))
    if not 0 < size <= ID_BYTES_MAX or not identifier.isprintable():
        raise UsageError(f"{what} {identifier!r}: use 1 to {ID_BYTES_MAX} bytes of printable text")
    return identifier


def encode_lake(identity: LakeIdentity) -> bytes:
    body: dict[str, Value] = {
        "lake": identity.lake_id,
        "slices": identity.slices,
        "ext": identity.ext,
        "created": identity.created_ms,
    }
    if identity.check_payload:  # written only if set: older readers do not know the key
        body["check_payload"] = True
    if identity.payload_schema is not None:
        body["payload_schema"] = identity.payload_schema
    return readable(Kind.LAKE, encode(Kind.LAKE, body), identity, decode_lake)


def decode_lake(data: bytes, what: str) -> LakeIdentity:
    fields = decode(Kind.LAKE, data, what)
    lake_id = fields.text("lake")
    ext = fields.text("ext")
    if not _LAKE_ID.fullmatch(lake_id) or not _EXT.fullmatch(ext):
        raise CorruptError(f"{what}: lake id {lake_id!r} with extension {ext!r}")
    slices = fields.integer("slices", low=1, high=SLICES_MAX)
    check_payload = "check_payload" in fields and fields.boolean("check_payload")
    schema = fields.text("payload_schema", bytes_max=SCHEMA_BYTES_MAX) if "payload_schema" in fields else None
    return LakeIdentity(lake_id, slices, ext, fields.integer("created"), check_payload, schema)


def encode_floor(lake_id: str, record: FloorRecord) -> bytes:
    body: dict[str, object] = {
        "lake": lake_id,
        "id": record.record_id,
        "floor": record.floor,
        "first_live_step": record.first_live_step,
        "closing": record.closing,
        "deleted_bytes": record.deleted_bytes,
        "time": record.time_ms,
    }
    # Keys that older readers do not know are written only where they say something.
    if record.grace_ms != GRACE_MS_DEFAULT:
        body["grace"] = record.grace_ms
    if record.swept_epochs:
        body |= {"swept_epochs": record.swept_epochs, "swept_time": record.swept_ms}
    if record.tombstones:
        assert len(record.tombstones) <= TOMBSTONES_MAX
        listed = sorted(record.tombstones.items())
        body["tombstones"] = b"".join(_TOMBSTONE.pack(bytes.fromhex(group), slot) for group, slot in listed)
    elif record.tombstones_at >= 0:
        body["tombstones_at"] = record.tombstones_at
    data = encode(Kind.FLOOR, body, totals=(record.deleted_bytes,))
    return readable(Kind.FLOOR, data, (lake_id, record), decode_floor)


def decode_floor(data: bytes, what: str) -> tuple[str, FloorRecord]:
    """→ (lake id, record)."""
    fields = decode(Kind.FLOOR, data, what)
    packed = fields.binary("tombstones") if "tombstones" in fields else b""
    if len(packed) % _TOMBSTONE.size:
        raise CorruptError(f"{what}: {len(packed)} bytes are no list of tombstones")
    return fields.text("lake"), FloorRecord(
        record_id=fields.binary("id", size=RECORD_ID_BYTES),
        floor=Version(fields.integer("floor")),
        first_live_step=Step(fields.integer("first_live_step")),
        closing=Step(fields.integer("closing")),
        deleted_bytes=fields.total("deleted_bytes"),
        time_ms=fields.integer("time"),
        grace_ms=fields.integer("grace") if "grace" in fields else GRACE_MS_DEFAULT,
        swept_epochs=fields.integer("swept_epochs") if "swept_epochs" in fields else 0,
        swept_ms=fields.integer("swept_time") if "swept_time" in fields else 0,
        tombstones={group.hex(): slot for group, slot in _TOMBSTONE.iter_unpack(packed)},
        tombstones_at=fields.integer("tombstones_at") if "tombstones_at" in fields else -1,
    )


def encode_consumer(lake_id: str, record: ConsumerRecord) -> bytes:
    body: dict[str, Value] = {
        "lake": lake_id,
        "id": record.record_id,
        "group": record.group,
        "kept": list(record.kept),
        "start": record.start,
        "retired": record.retired,
        "time": record.time_ms,
    }
    # Keys that older readers do not know are written only where they say something.
    if record.order != record.kept:
        body["recorded"] = list(record.order)
    if record.opened:
        body["opened"] = record.opened
    return readable(Kind.CONSUMER, encode(Kind.CONSUMER, body), (lake_id, record), decode_consumer)


def decode_consumer(data: bytes, what: str) -> tuple[str, ConsumerRecord]:
    """→ (lake id, record)."""
    fields = decode(Kind.CONSUMER, data, what)
    kept = fields.integers("kept", items_max=KEPT_CHECKPOINTS_MAX)
    if kept != sorted(set(kept)):
        raise CorruptError(f"{what}: kept checkpoints are not ascending and distinct")
    recorded = fields.integers("recorded", items_max=KEPT_CHECKPOINTS_MAX) if "recorded" in fields else kept
    if sorted(recorded) != kept:
        raise CorruptError(f"{what}: the order of recording names other checkpoints than are kept")
    return fields.text("lake"), ConsumerRecord(
        record_id=fields.binary("id", size=RECORD_ID_BYTES),
        group=fields.text("group"),
        kept=tuple(Step(next_step) for next_step in kept),
        start=Step(fields.integer("start")),
        retired=fields.boolean("retired"),
        time_ms=fields.integer("time"),
        recorded=() if recorded == kept else tuple(Step(next_step) for next_step in recorded),
        opened=Step(fields.integer("opened") if "opened" in fields else 0),
    )
