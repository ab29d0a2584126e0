"""Records of a source: how it is declared, the blocks in which it is read, and the values that they hold.

A source is *ordered* by blocks (8 MiB by default), *read* by fragments, and transformed by groups of records (parts of a
block); see producer/PLANNING.md. A task has no listing, so it is small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from fractions import Fraction
from pickle import PickleBuffer
from typing import Any, Final, NamedTuple, SupportsIndex

import msgpack
import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.arrays import IGNORED, Integers

BLOCK_BYTES: Final = 8 << 20


_PICKLE_WITH_BUFFERS: Final = 5
RECORD_BYTES_MAX: Final = 64 << 20
_POLICY: Final = {"identity": False}
_ABSENT: Final = object()

TOKEN_MAX: Final = 2**31 - 1
_NAMES_SHOWN: Final = 5
_NAME_SHOWN: Final = 40  # characters


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One source as a plan declares it: how to find, read and order its records. See `identity_of`."""

    name: str = field(metadata=_POLICY)
    format: str  # jsonl, text, parquet, megatron; or `module:Class` of the user
    files: tuple[str, ...] = field(metadata=_POLICY)  # files, directories, globs; s3:// URLs of them
    seed: int = 0
    records: str = "lines"  # of text: lines, or files
    text_field: str = "text"  # of JSONL and Parquet, where a record's text is taken
    tokens_field: str | None = None  # a column of token ids in place of text
    mask_field: str | None = None  # beside `tokens_field`: 0 or False where the loss ignores the token
    labels_field: str | None = None  # beside `tokens_field`: -100 where the loss ignores the token
    columns: tuple[str, ...] | None = None  # of whole rows, the ones to read; None: all
    whole_records: bool = False  # a transform gets the whole JSON object or row, not its text
    shuffle: bool = True
    block_bytes: int = BLOCK_BYTES
    epochs: Fraction | None = field(default=None, metadata=_POLICY)  # None: without end
    holdout: Fraction = Fraction(0)  # share of records that only a run with `held_out` produces
    held_out: bool = False
    shard: tuple[int, int] = (0, 1)  # index, count: a hash of its bytes deals a record to one of them
    endpoint_url: str | None = field(default=None, metadata=_POLICY)
    profile: str | None = field(default=None, metadata=_POLICY)
    skip_damaged: bool = field(default=False, metadata=_POLICY)  # the rest of a damaged file is one bad record
    version: str = ""  # of the user's code, as declared
    options: Mapping[str, str] = field(default_factory=dict)  # for a format of the user's


def identity_of(value: object) -> Any:
    """What a cursor's numbers depend on, as JSON: every field of a declaration, unless its metadata says it is policy.

    A field that is None is left out, so that a later field changes nothing for those that do not use it.
    """
    if is_dataclass(value):
        named = {one.name: getattr(value, one.name) for one in fields(value) if one.metadata.get("identity", True)}
        return {name: identity_of(one) for name, one in named.items() if one is not None}
    if isinstance(value, Mapping):
        return sorted(value.items())
    if isinstance(value, tuple):
        return [identity_of(one) for one in value]
    return str(value) if isinstance(value, Fraction) else value


class Line(NamedTuple):
    """A line without its end. `data` None: too long."""

    offset: int
    length: int  # bytes
    data: bytes | None


class BlockAddress(NamedTuple):
    """The place of a block in the endless order of its source."""

    epoch: int
    fragment: int  # place of its first fragment in the order of the epoch
    block: int  # in that fragment; 0 unless the fragment is cut into several blocks


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
    """Consecutive records of a block. `data[ends[i - 1]:ends[i]]` is record i."""

    kind: Kind
    data: bytes | memoryview
    ends: Integers
    files: Integers  # per record: number of its file in the listing
    offsets: Integers  # per record: its first byte, or its row, in the file
    dropped: NDArray[np.bool_]  # per record: not of this run (holdout, fractional epoch)
    bad: Mapping[int, str] = field(default_factory=dict)  # record → why it cannot be decoded; it has no bytes
    mask: bytes | memoryview | None = None  # of TOKENS: one byte per token, 0 where the loss ignores it

    def __len__(self) -> int:
        return len(self.ends)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[Records], tuple[object, ...]]:
        """Protocol 5 may keep bytes beside the pickle, and map them where it is read."""
        beside = PickleBuffer if protocol.__index__() >= _PICKLE_WITH_BUFFERS else bytes
        mask = None if self.mask is None else beside(self.mask)
        fields = (self.kind, beside(self.data), self.ends, self.files, self.offsets, self.dropped)
        return Records, (*fields, self.bad, mask)

    def part(self, first: int, last: int) -> Records:
        """Records first … last - 1."""
        begin = int(self.ends[first - 1]) if first else 0
        end = int(self.ends[last - 1]) if last else 0
        tokens = slice(begin // 4, end // 4)
        return Records(
            self.kind,
            bytes(self.data[begin:end]),
            self.ends[first:last] - begin,
            self.files[first:last],
            self.offsets[first:last],
            self.dropped[first:last],
            {index - first: why for index, why in self.bad.items() if first <= index < last},
            None if self.mask is None else bytes(self.mask[tokens]),
        )


@dataclass(frozen=True, slots=True)
class Block:
    """One block as read. It may have no record."""

    place: BlockAddress
    records: Records
    follows: BlockAddress  # of the next block; of the next epoch behind an epoch's last one
    ended: bool = False  # the source has no block there: its epochs are used up
    crc32c: int = 0  # of where its records begin, and of lines' bytes; nothing that policy or a library decides


class Bad(NamedTuple):
    """A record that cannot be decoded."""

    reason: str


class Tokens(NamedTuple):
    """A record of token ids."""

    ids: bytes  # little-endian int32
    mask: bytes | None  # one byte per id


Value = bytes | Tokens | Bad


def weight_of(value: Value) -> int:
    """Its bytes."""
    if isinstance(value, Bad):
        return 0
    return len(value.ids if isinstance(value, Tokens) else value)


class Raw(NamedTuple):
    """A record as stored. `weight`: its bytes, for cutting a large fragment into blocks; `stored`: for `decode`."""

    file: int
    offset: int  # bytes, or rows
    weight: int
    stored: Any


def kind_of(spec: SourceSpec, whole: Kind = Kind.JSON) -> Kind:
    """The kind of records made of objects and rows; `whole`: of those that a transform gets whole."""
    if spec.tokens_field is not None:
        return Kind.TOKENS
    return whole if spec.whole_records else Kind.TEXT


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


def json_line(spec: SourceSpec, line: Line) -> Value:
    if line.data is None:
        return too_long(line)
    value = _parsed(line.data)
    if isinstance(value, Bad):
        return value
    if not isinstance(value, dict):
        return Bad("not a JSON object")
    if spec.tokens_field is None and spec.whole_records:
        return line.data.strip()
    return fields_of(spec, value)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        return Bad(f"not UTF-8 ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        return Bad(f"not JSON ({error.msg} at character {error.pos})")
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits; lists 1,000 deep
        return Bad(f"not JSON ({error})")


def fields_of(spec: SourceSpec, value: dict[str, Any]) -> Value:
    if spec.tokens_field is None:
        found = _field(value, spec.text_field)
        if found is _ABSENT:
            return Bad(f"no field {spec.text_field!r}; it has {_names(value)}")
        return text_of(found, spec.text_field)
    columns: list[Any] = []
    for name in (spec.tokens_field, spec.mask_field, spec.labels_field):
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


def _names(value: dict[str, Any]) -> str:
    """The first fields of a record, for messages."""
    shown = ", ".join(repr(name[:_NAME_SHOWN]) for name in list(value)[:_NAMES_SHOWN])
    return (shown or "none") + (", …" if len(value) > _NAMES_SHOWN else "")


def text_of(value: object, field: str) -> Value:
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
