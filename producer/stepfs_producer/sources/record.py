"""Records of a source: the blocks in which it is read, and the values that they hold.

A source is *ordered* by blocks (8 MiB by default), *read* by fragments, and transformed by groups of records (parts of a
block); see producer/PLANNING.md. A task has no listing, so it is small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from fractions import Fraction
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.arrays import IGNORED, Integers, Mask
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.samples import BlockHead
from stepfs_producer.plan.sources import BLOCK_BYTES, SourceFiles, WithText
from stepfs_producer.plan.values import Document

RECORD_BYTES_MAX: Final = 64 << 20
TAG_BYTES_MAX: Final = 256
_ABSENT: Final = object()

ID_BYTES: Final = 4
TOKEN_MAX: Final = 2**31 - 1
_NAMES_SHOWN: Final = 5
_NAME_SHOWN: Final = 40  # characters


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source of a run: `source` has the settings of the plan's defaults, too, and the places of its files from here."""

    name: str
    source: SourceFiles
    seed: int = 0
    held_out: bool = False  # produce the records that the plan holds out, and no others
    sample_bytes: int | None = None  # of a block, where a few records are looked at
    exclude: tuple[Document, ...] = ()  # those of other sources are not among them

    @property
    def block_bytes(self) -> int:
        """The records of a block, about."""
        shuffle = self.source.shuffle
        return self.sample_bytes or (BLOCK_BYTES if shuffle is None else shuffle.block)


class Line(NamedTuple):
    """A line without its end. `data` None: too long."""

    offset: int
    length: int  # bytes
    data: bytes | None


class Unit(Enum):
    """The fragments of a file."""

    RANGES = "byte ranges"
    PARTS = "parts, as listed"
    WHOLE = "the file, whose decoded size is unknown"
    NONE = "nothing: it belongs to another file"


class FileRef(NamedTuple):
    """A listed file, and where it lies."""

    location: str
    size: int
    etag: str
    head: str
    name: str = ""  # in the listing


class Fragment(NamedTuple):
    """A part of a file that is read at once."""

    file: int  # number in the listing
    ref: FileRef
    begin: int  # byte range; of a part: (0, its listed bytes)
    end: int
    part: int = -1  # number of the part in its file; -1: the byte range itself
    first_record: int = 0  # of a part: records of the file before it
    beside: FileRef | None = None  # the file beside it with the places of its records


@dataclass(frozen=True, slots=True)
class BlockTask:
    """One block to be read."""

    place: BlockAddress
    fragments: tuple[Fragment, ...]
    key: bytes  # of the order of its records
    cut: bool  # one fragment, of which this is block `place.block`; else whole fragments
    next_fragment: BlockAddress  # behind the last fragment
    epochs_end: int | None  # the first epoch that the source does not have
    share: Fraction | None  # of the epoch's records that are read; None: all


class Kind(StrEnum):
    """The content of a record."""

    TEXT = "text"  # UTF-8, still to be tokenised
    JSON = "json"  # a JSON object in UTF-8, for a transform of the user's
    FIELDS = "fields"  # the same, and as msgpack where it holds bytes: see `fields.packed`
    TOKENS = "tokens"  # little-endian int32 ids


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive records of a block."""

    kind: Kind
    data: Ragged  # bytes
    files: Integers  # per record: number of its file in the listing
    offsets: Integers  # per record: its first byte, or its row, in the file
    dropped: NDArray[np.bool_]  # per record: not of this run (holdout, fractional epoch)
    bad: Mapping[int, str] = field(default_factory=dict)  # record → why it cannot be decoded; it has no bytes
    mask: Mask | None = None  # of TOKENS: per token, 0 where the loss ignores it
    excluded: Mapping[int, Document] = field(
        default_factory=dict
    )  # record → what the plan calls it; it is dropped, too
    tags: Ragged | None = None  # UTF-8; None: the source has none

    def __len__(self) -> int:
        return len(self.data)

    def part(self, first: int, last: int) -> Records:
        """Records first … last - 1."""
        begin, end = (int(self.data.ends[record - 1]) // ID_BYTES if record else 0 for record in (first, last))
        return Records(
            self.kind,
            self.data.part(first, last),
            self.files[first:last],
            self.offsets[first:last],
            self.dropped[first:last],
            {index - first: why for index, why in self.bad.items() if first <= index < last},
            None if self.mask is None else self.mask[begin:end],
            {index - first: one for index, one in self.excluded.items() if first <= index < last},
            None if self.tags is None else self.tags.part(first, last),
        )


@dataclass(frozen=True, slots=True)
class Block:
    """One block as read. It may have no record."""

    place: BlockAddress
    records: Records
    follows: BlockAddress  # of the next block; of the next epoch behind an epoch's last one
    ended: bool = False  # the source has no block there: its epochs are used up
    crc32c: int = 0  # of where its records begin, and of lines' bytes; nothing that policy or a library decides

    @property
    def head(self) -> BlockHead:
        return BlockHead(self.place, len(self.records), self.follows, self.ended, self.crc32c)


class Bad(NamedTuple):
    """A record that cannot be decoded."""

    reason: str


class Tokens(NamedTuple):
    """A record of token ids."""

    ids: bytes  # little-endian int32
    mask: bytes | None  # one byte per id


class Tagged(NamedTuple):
    """A record, and the tag that it has."""

    value: bytes | Tokens
    tag: bytes  # UTF-8


Value = bytes | Tokens | Bad | Tagged


def weight_of(value: Value) -> int:
    """Its bytes, without its tag."""
    if isinstance(value, Bad):
        return 0
    if isinstance(value, Tagged):
        value = value.value
    return len(value.ids if isinstance(value, Tokens) else value)


class Raw(NamedTuple):
    """A record as stored. `weight`: its bytes, for cutting a large fragment into blocks; `stored`: for `decode`."""

    file: int
    offset: int  # bytes, or rows
    weight: int
    stored: Any


def kind_of(source: SourceFiles, whole: Kind = Kind.JSON) -> Kind:
    """The kind of records made of objects and rows; `whole`: of those that are taken with all their fields."""
    if source.id_fields is not None:
        return Kind.TOKENS
    return whole if source.takes_whole else Kind.TEXT


def packed(value: dict[str, Any]) -> Value:
    """An object as a record of `FIELDS`. Times, decimals and the like are written as Python prints them.

    JSON, which has no room for bytes; with bytes in it: msgpack, which never begins with a brace here. So the hash that
    deals records to shards and holdouts is that of the JSON wherever there is one.
    """
    try:
        try:
            return json.dumps(value, ensure_ascii=False, default=_printed).encode()
        except _HoldsBytesError:
            data: bytes = msgpack.packb(value, default=str)
            return data
    except UnicodeError as error:
        return Bad(f"not UTF-8 ({error.reason})" if isinstance(error, UnicodeDecodeError) else "not Unicode")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return Bad(f"neither JSON nor msgpack ({error})")


def unpacked(data: bytes) -> Any:
    """The object of a record of `FIELDS`."""
    return json.loads(data) if data.startswith(b"{") else msgpack.unpackb(data, strict_map_key=False)


class _HoldsBytesError(Exception):
    """The object is not for JSON."""


def _printed(value: object) -> str:
    if isinstance(value, bytes):
        raise _HoldsBytesError
    return str(value)


def text_line(line: Line) -> Value:
    if line.data is None:
        return too_long(line)
    try:
        line.data.decode()
    except UnicodeDecodeError as error:
        return Bad(f"not UTF-8 ({error.reason} at byte {error.start})")
    return line.data


def text_file(line: Line) -> Value:
    """A text file, or a piece of one."""
    if line.data is not None and b"\0" in line.data:
        return Bad("a NUL byte, so it is no text")
    return text_line(line)


def json_line(source: SourceFiles, line: Line) -> Value:
    if line.data is None:
        return too_long(line)
    value = _parsed(line.data)
    if isinstance(value, Bad):
        return value
    if not isinstance(value, dict):
        return Bad("not a JSON object")
    return tagged(source, line.data.strip() if kind_of(source) is Kind.JSON else fields_of(source, value), value)


def tagged(source: SourceFiles, value: Value, fields: Mapping[str, Any]) -> Value:
    """A record with the tag among its fields, where the source has one."""
    if source.tag is None:
        return value
    found = _field(fields, source.tag)
    if found is _ABSENT:
        return Bad(f"no field {source.tag!r} for its tag; it has {_names(fields)}")
    return with_tag(value, found, source.tag)


def with_tag(value: Value, found: object, field: str) -> Value:
    """A record with its tag; `Bad` where that is none."""
    tag = text_of(found, field)
    if isinstance(value, Bad | Tagged) or isinstance(tag, Bad):
        return value if isinstance(value, Bad | Tagged) else tag
    if len(tag) > TAG_BYTES_MAX:
        return Bad(f"a tag of {len(tag)} bytes in the field {field!r}; at most {TAG_BYTES_MAX} are kept")
    return Tagged(value, tag)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        return Bad(f"not UTF-8 ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        return Bad(f"not JSON ({error.msg} at character {error.pos})")
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits; lists 1,000 deep
        return Bad(f"not JSON ({error})")


def fields_of(source: SourceFiles, value: dict[str, Any]) -> Value:
    if source.id_fields is None:
        assert isinstance(source, WithText)
        found = _field(value, source.text_field)
        if found is _ABSENT:
            return Bad(f"no field {source.text_field!r}; it has {_names(value)}")
        return text_of(found, source.text_field)
    columns: list[Any] = []
    for name in source.id_fields:
        column = _field(value, name) if name else None
        if name and not isinstance(column, list):
            return Bad(f"no list in the field {name!r}")
        columns.append(column)
    return tokens_of(*columns)


def _field(value: Any, name: str) -> Any:
    """The field of that name; of a name with dots, such as meta.text, the field within a field."""
    if name in value:
        return value[name]
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _names(value: Mapping[str, Any]) -> str:
    """The first fields of a record, for messages."""
    shown = ", ".join(repr(name[:_NAME_SHOWN]) for name in list(value)[:_NAMES_SHOWN])
    return (shown or "none") + (", …" if len(value) > _NAMES_SHOWN else "")


def text_of(value: object, field: str) -> bytes | Bad:
    if isinstance(value, bytes):
        try:
            value.decode()
        except UnicodeDecodeError as error:
            return Bad(f"not UTF-8 ({error.reason} at byte {error.start})")
        return value
    if not isinstance(value, str):
        return Bad(f"{'null' if value is None else 'no text'} in the field {field!r}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        return Bad(f"not Unicode ({error.reason} at character {error.start})")


def tokens_of(ids: Sequence[int], mask: Sequence[int] | None = None, labels: Sequence[int] | None = None) -> Value:
    """Token ids with their loss mask: that of `mask`, of `labels` (-100 is ignored), or both."""
    array = _integers(ids, "iu")
    if array is None:
        return Bad("token ids that are no integers")
    if len(array) and not (array.min() >= 0 and array.max() <= TOKEN_MAX):
        return Bad(f"token ids outside of 0 … {TOKEN_MAX}")
    kept = np.ones(len(array), bool)
    for column, ignored in ((mask, 0), (labels, IGNORED)):
        if column is None:
            continue
        values = _integers(column, "iub")
        if values is None or len(values) != len(array):
            return Bad("mask or labels that are no integers, or not as many as token ids")
        kept &= values != ignored
    masked = mask is not None or labels is not None
    return Tokens(array.astype("<i4").tobytes(), kept.astype(np.uint8).tobytes() if masked else None)


def _integers(values: Sequence[int], kinds: str) -> NDArray[np.integer] | None:
    """Values as a flat array, None if they are anything else. Nothing is rounded or parsed."""
    if not len(values):
        return np.zeros(0, np.int64)
    try:
        array = np.asarray(values)
    except (OverflowError, ValueError):  # lists of different lengths
        return None
    return array if array.ndim == 1 and array.dtype.kind in kinds else None


def too_long(line: Line) -> Bad:
    return Bad(f"a line of {line.length} bytes; at most {RECORD_BYTES_MAX} are read")
