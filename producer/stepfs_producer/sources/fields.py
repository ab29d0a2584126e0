"""One stored record → the bytes that a block holds of it, or why it has none: a function of the record's bytes alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from stepfs_producer.sources.block import Kind
from stepfs_producer.sources.lines import RECORD_BYTES_MAX, Line
from stepfs_producer.sources.spec import SourceSpec

TOKEN_MAX: Final = 2**31 - 1
IGNORED_LABEL: Final = -100
_NAMES_SHOWN: Final = 5
_NAME_SHOWN: Final = 40  # characters


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
        if spec.text_field not in value:
            return Bad(f"no field {spec.text_field!r}; it has {_names(value)}")
        return text_of(value[spec.text_field], spec.text_field)
    columns: list[Any] = []
    for name in (spec.tokens_field, spec.mask_field, spec.labels_field):
        column = value.get(name) if name else None
        if name and not isinstance(column, list):
            return Bad(f"no list in the field {name!r}")
        columns.append(column)
    return tokens_of(*columns)


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
        return Bad(f"no text in the field {field!r}")
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
    for column, ignored in ((mask, 0), (labels, IGNORED_LABEL)):
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
