"""Parquet: a fragment is a row group, a record is a row. Only the needed columns of a row group are read, in pieces.

`pre_buffer=False, buffer_size=1 MiB` keeps memory small: a row group of 251 MiB peaks at +46 MiB so, at +450 read whole.
A row group's listed bytes are those of the needed columns, uncompressed but encoded as stored: a column of few
distinct values may be far larger in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from stepfs.errors import CorruptError, MissingPackageError, UsageError
from stepfs_producer.plan.sources import VARIABLES, Parquet, SourceFiles, WithChats, WithText
from stepfs_producer.sources.files import Format, OpenFile, Stream, open_listed
from stepfs_producer.sources.record import (
    Bad,
    Fragment,
    Kind,
    Raw,
    SourceSpec,
    Unit,
    Value,
    kind_of,
    packed,
    text_of,
    tokens_of,
    weight_of,
    with_tag,
)

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_Read = Callable[[Any], list[Any]]  # an array of Arrow's → its values
_BUFFER_BYTES: Final = 1 << 20
_JSON: Final = "arrow.json"  # of the Arrow field: the name that `Json()` of datasets has there
ROWS_MAX: Final = 256  # decoded at a time
_TEXTS: Final = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
_OF_TEXT: Final = {"text_field", "tag"}
_LISTS: Final = ("list", "large_list", "list_view", "large_list_view", "fixed_size_list")
BATCH_BYTES: Final = 4 << 20  # of the needed columns as listed, in rows of the group's mean size


class ParquetFormat(Format):
    """Rows with a text, with token ids, or whole."""

    suffixes = (".parquet", ".parq", ".pq")

    def kind(self, spec: SourceSpec) -> Kind:
        return kind_of(spec.source, Kind.FIELDS)

    def unit(self, name: str) -> Unit:  # noqa: ARG002
        return Unit.PARTS

    def parts(self, spec: SourceSpec, file: OpenFile) -> Sequence[tuple[int, int]]:
        """(rows, bytes of the needed columns) of each row group, from the footer."""
        with _parquet(file) as parquet:
            signed = (
                int.from_bytes(file.read(file.size - 8, file.size)[:4], "little") != parquet.metadata.serialized_size
            )
            if signed:  # asking for an encrypted column's sizes would end the process
                raise _unreadable(file.location, "it is encrypted")
            needed = _read_columns(spec.source)
            check_columns(spec, file.location, parquet.schema_arrow)
            groups = []
            for number in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(number)
                chunks = (group.column(column) for column in range(group.num_columns))
                sizes = [
                    chunk.total_uncompressed_size
                    for chunk in chunks
                    if needed is None or _is_of(chunk.path_in_schema, needed)
                ]
                groups.append((group.num_rows, sum(sizes)))
            return groups

    def records(self, spec: SourceSpec, fragment: Fragment) -> Iterator[Raw]:
        with open_listed(spec, fragment.ref) as file, _parquet(file) as parquet:
            offset = fragment.first_record
            rows = parquet.metadata.row_group(fragment.part).num_rows
            batch_size = max(1, min(ROWS_MAX, BATCH_BYTES * rows // max(fragment.end, 1)))
            batches = parquet.iter_batches(
                batch_size=batch_size,
                row_groups=[fragment.part],
                columns=_read_columns(spec.source),
                use_threads=False,
            )
            for batch in batches:
                for value in values_of(spec.source, batch):
                    yield Raw(fragment.file, offset, weight_of(value), value)
                    offset += 1


def _read_columns(source: SourceFiles) -> list[str] | None:
    """Those of the record, and of its tag; None: all."""
    needed = needed_columns(source)
    return needed if needed is None or source.tag in (None, *needed) else [*needed, str(source.tag)]


def needed_columns(source: SourceFiles) -> list[str] | None:
    """Those of the record; None: all."""
    if source.id_fields is not None:
        return [name for name in source.id_fields if name]
    if source.takes_whole:
        named = source.columns if isinstance(source, Parquet) else None
        if isinstance(source, WithChats) and source.is_of_chats:
            named = None if source.chat_fields is None else (*source.chat_fields, VARIABLES)
        return None if named is None else list(named)
    assert isinstance(source, WithText)
    return [source.text_field]


def _is_of(path: str, columns: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in columns)


@contextmanager
def _parquet(file: OpenFile) -> Iterator[ParquetFile]:
    """The opened file. `CorruptError` names a damaged one; errors of reading pass as they were raised."""
    if find_spec("pyarrow") is None:
        raise MissingPackageError(f"{file.location}: Parquet needs the package pyarrow: pip install 'stepfs[parquet]'")
    from pyarrow import ArrowException, ArrowMemoryError, ArrowNotImplementedError  # noqa: PLC0415  (optional, and 0.2 s)
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415

    raw = Stream(file)
    try:
        with ParquetFile(raw, pre_buffer=False, buffer_size=_BUFFER_BYTES) as parquet:
            yield parquet
    except ArrowMemoryError:
        raise
    except ArrowNotImplementedError as error:
        raise _unreadable(file.location, " ".join(str(error).split())[:200]) from error
    except (ArrowException, OSError) as error:  # Arrow calls damage an OSError, too
        if raw.failed is not None:
            raise raw.failed from error
        reason = " ".join(str(error).split())[:200]
        if "encrypted" in reason:
            raise _unreadable(file.location, "it is encrypted") from error
        raise CorruptError(f"{file.location}: damaged Parquet ({reason}); replace it or leave it out") from error


def _unreadable(location: str, reason: str) -> UsageError:
    return UsageError(
        f"{location}: this Parquet file cannot be read: {reason}; write it anew without that, or leave it out"
    )


def check_columns(spec: SourceSpec, location: str, schema: Any) -> None:
    """`UsageError` names a column that a file of Parquet or Arrow lacks, has twice, or has of another type."""
    from pyarrow import types  # noqa: PLC0415

    source = spec.source
    wanted: dict[str, str | None] = {}
    if source.id_fields is not None:
        wanted = dict(zip(("tokens_field", "mask_field", "labels_field"), source.id_fields, strict=True))
    elif not source.takes_whole:
        assert isinstance(source, WithText)
        wanted = {"text_field": source.text_field}
    wanted["tag"] = source.tag
    _refuse_columns(spec, location, schema.names, _read_columns(source))
    for option, name in wanted.items():
        if name is None:
            continue
        kind = _field_of(schema, name)
        if kind is None:
            raise UsageError(
                f"source {spec.name}: {location} has no column {name!r}; set {option} to one of "
                f"{', '.join(schema.names[:20])}"
            )
        if option in _OF_TEXT:
            kind = kind.value_type if types.is_dictionary(kind) else getattr(kind, "storage_type", kind)
            fits = any(getattr(types, f"is_{one}")(kind) for one in _TEXTS)
        else:
            listed = any(getattr(types, f"is_{one}")(kind) for one in _LISTS)
            # Null: of a file whose lists are empty.
            numbers = (types.is_integer, types.is_boolean, types.is_null)
            fits = types.is_null(kind) or (listed and any(test(kind.value_type) for test in numbers))
        if not fits:
            need = "text" if option in _OF_TEXT else "lists of integers"
            raise UsageError(
                f"source {spec.name}: {location}: column {name!r} is of type {kind}, not of {need}; "
                f"set {option} to another column"
            )


def _refuse_columns(spec: SourceSpec, location: str, names: Sequence[str], needed: Sequence[str] | None) -> None:
    """`UsageError` for a needed column that is not there, or twice."""
    firsts = names if needed is None else [name if name in names else name.partition(".")[0] for name in needed]
    for column in firsts:
        if spec.source.takes_whole and column not in names and column != VARIABLES:
            raise UsageError(f"source {spec.name}: {location} has no column {column!r}; it has {', '.join(names[:20])}")
        if names.count(column) > 1:
            raise UsageError(f"source {spec.name}: {location} has two columns {column!r}; rename one")


def values_of(source: SourceFiles, batch: Any) -> Iterator[Value]:
    """The records of a batch of Arrow's, with their tags where the source has any."""
    if source.tag is None:
        return _untagged(source, batch)
    return map(with_tag, _untagged(source, batch), _texts(batch, source.tag), repeat(source.tag))


def _untagged(source: SourceFiles, batch: Any) -> Iterator[Value]:
    if source.id_fields is not None:
        columns = [None if name is None else _column(batch, name) for name in source.id_fields]
        for row in range(batch.num_rows):
            yield _tokens(columns, row)
    elif source.takes_whole:
        for found in _rows(batch, needed_columns(source), padded=source.is_of_chats):
            yield found if isinstance(found, Bad) else packed(found)
    else:
        assert isinstance(source, WithText)
        for text in _texts(batch, source.text_field):
            yield text_of(text, source.text_field)


def _texts(batch: Any, name: str) -> list[bytes | None]:
    """As bytes: one text that is not UTF-8 must not make its neighbours unreadable."""
    from pyarrow import large_binary  # noqa: PLC0415

    column = _column(batch, name)
    found: list[bytes | None] = getattr(column, "storage", column).cast(large_binary()).to_pylist()
    return found


def _column(batch: Any, name: str) -> Any:
    """The column of that name; of a name with dots, such as meta.text, the field within a column."""
    from pyarrow.compute import struct_field  # noqa: PLC0415

    if name in batch.schema.names:
        return batch.column(name)
    first, *inner = name.split(".")
    return struct_field(batch.column(first), inner)


def _field_of(schema: Any, name: str) -> Any:
    """Its type; None if there is none."""
    if name in schema.names:
        return schema.field(name).type
    first, *inner = name.split(".")
    kind: Any = schema.field(first).type if first in schema.names else None
    for one in inner:
        place = getattr(kind, "get_field_index", lambda _: -1)(one)
        kind = kind.field(place).type if place >= 0 else None
    return kind


def _tokens(columns: Sequence[Any], row: int) -> Value:
    found: list[Any] = []
    for column in columns:
        if column is None:
            found.append(None)
            continue
        values = getattr(column[row], "values", None)  # a column of nulls has none
        if values is None or values.null_count:
            return Bad("no token ids, mask or labels, or a null among them")
        found.append(values.to_numpy(zero_copy_only=False))
    return tokens_of(*found)


def _rows(batch: Any, names: Sequence[str] | None, *, padded: bool) -> Iterator[dict[str, Any] | Bad]:
    """Rows as Python's values, of these columns; None: of all. What `datasets` keeps as `Json()` is what it reads of it.

    `padded`: fields of structs that are null were never there; Arrow gives each struct all the fields that any has.
    """
    wanted = None if names is None else {name.partition(".")[0] for name in names}
    columns = [
        (field.name, batch.column(field.name), _reader(field.type, padded=padded))
        for field in batch.schema
        if wanted is None or field.name in wanted
    ]
    for row in range(batch.num_rows):
        try:
            yield {name: read(column.slice(row, 1))[0] for name, column, read in columns}
        except UnicodeDecodeError as error:
            yield Bad(f"not UTF-8 ({error.reason})")
        except json.JSONDecodeError as error:
            yield Bad(f"not JSON ({error.msg} at character {error.pos})")


def _reader(kind: Any, *, padded: bool) -> _Read:  # noqa: PLR0911 - one a kind of type
    """What makes Python's values of an array of this type, whatever is nested in it."""
    from pyarrow import types  # noqa: PLC0415

    def inside(*kinds: Any) -> list[_Read]:
        """None, if Arrow itself does it."""
        found = [_reader(one, padded=padded) for one in kinds]
        return [] if all(one is _plain for one in found) else found

    if getattr(kind, "extension_name", "") == _JSON:
        return lambda array: [None if text is None else json.loads(text) for text in array.storage.to_pylist()]
    if types.is_temporal(kind):
        return _times
    if types.is_dictionary(kind) and (reads := inside(kind.value_type)):
        return lambda array: reads[0](array.dictionary_decode())
    if types.is_struct(kind) and ((reads := inside(*(one.type for one in kind))) or padded):
        return partial(_structs, [one.name for one in kind], reads or [_plain] * kind.num_fields, padded)
    if types.is_map(kind) and (reads := inside(kind.key_type, kind.item_type)):
        return lambda array: [None if one.values is None else _pairs(reads, one.values) for one in array]
    if any(getattr(types, f"is_{one}")(kind) for one in _LISTS) and (reads := inside(kind.value_type)):
        return lambda array: [None if one.values is None else reads[0](one.values) for one in array]
    return _plain


def _plain(array: Any) -> list[Any]:
    values: list[Any] = array.to_pylist()
    return values


def _structs(names: Sequence[str], reads: Sequence[_Read], padded: bool, array: Any) -> list[Any]:
    columns = [(name, read(array.field(place))) for place, (name, read) in enumerate(zip(names, reads, strict=True))]
    return [
        {name: values[row] for name, values in columns if not (padded and values[row] is None)} if is_there else None
        for row, is_there in enumerate(array.is_valid().to_pylist())
    ]


def _pairs(reads: Sequence[_Read], entries: Any) -> list[tuple[Any, Any]]:
    keys, items = (read(entries.field(place)) for place, read in enumerate(reads))
    return list(zip(keys, items, strict=True))


def _times(array: Any) -> list[Any]:
    """In microseconds, as Python has them; those that it has no value for as text, in UTC where a zone is unknown."""
    from pyarrow import ArrowInvalid, duration, int64, string, time64, timestamp, types  # noqa: PLC0415

    kind = array.type
    zone = getattr(kind, "tz", None)
    try:
        if getattr(kind, "unit", "us") != "ns":
            return _plain(array)
        of_zone = timestamp("us", zone)
        return _plain(
            array.cast(
                of_zone if types.is_timestamp(kind) else duration("us") if types.is_duration(kind) else time64("us")
            )
        )
    except (
        ValueError,
        OverflowError,
        KeyError,
    ):  # finer than microseconds, a date beyond 9999, a zone of another machine
        try:
            return _plain(array.cast(string()))
        except ArrowInvalid:
            return _times(array.cast(int64()).cast(timestamp(kind.unit, "UTC")))
