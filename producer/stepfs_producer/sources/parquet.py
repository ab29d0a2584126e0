"""Parquet: a fragment is a row group, a record is a row. Only the needed columns of a row group are read, in pieces.

`pre_buffer=False, buffer_size=1 MiB` keeps memory small: a row group of 251 MiB peaks at +46 MiB so, at +450 read whole.
A row group's listed bytes are those of the needed columns, uncompressed but encoded as stored: a column of few
distinct values may be far larger in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from stepfs.errors import CorruptError, MissingPackageError, UsageError
from stepfs_producer.plan.sources import VARIABLES, Parquet, SourceFiles
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
)

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_BUFFER_BYTES: Final = 1 << 20
ROWS_MAX: Final = 256  # decoded at a time
_TEXTS: Final = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
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
            needed = _columns(spec.source)
            _check_columns(spec, file.location, parquet)
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
                batch_size=batch_size, row_groups=[fragment.part], columns=_columns(spec.source), use_threads=False
            )
            for batch in batches:
                for value in _values(spec.source, batch):
                    yield Raw(fragment.file, offset, weight_of(value), value)
                    offset += 1


def _columns(source: SourceFiles) -> list[str] | None:
    """The needed columns; None: all."""
    assert isinstance(source, Parquet)
    if source.id_fields is not None:
        return [name for name in source.id_fields if name]
    if source.takes_whole:
        named = source.chat_fields if source.is_of_chats else source.columns
        return None if named is None else [*named, *([VARIABLES] if source.is_of_chats else [])]
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


def _check_columns(spec: SourceSpec, location: str, parquet: ParquetFile) -> None:
    from pyarrow import types  # noqa: PLC0415

    schema, source = parquet.schema_arrow, spec.source
    assert isinstance(source, Parquet)
    wanted: dict[str, str | None] = {} if source.takes_whole else {"text_field": source.text_field}
    if source.id_fields is not None:
        wanted = dict(zip(("tokens_field", "mask_field", "labels_field"), source.id_fields, strict=True))
    needed = _columns(source) if source.takes_whole and source.id_fields is None else None
    for column in needed or ():
        if column != VARIABLES and _field_of(schema, column) is None:
            raise UsageError(
                f"source {spec.name}: {location} has no column {column!r}; it has {', '.join(schema.names[:20])}"
            )
    for option, name in wanted.items():
        if name is None:
            continue
        kind = _field_of(schema, name)
        if kind is None:
            raise UsageError(
                f"source {spec.name}: {location} has no column {name!r}; set {option} to one of "
                f"{', '.join(schema.names[:20])}"
            )
        if option == "text_field":
            kind = kind.value_type if types.is_dictionary(kind) else kind
            fits = any(getattr(types, f"is_{one}")(kind) for one in _TEXTS)
        else:
            listed = any(getattr(types, f"is_{one}")(kind) for one in _LISTS)
            # Null: of a file whose lists are empty.
            numbers = (types.is_integer, types.is_boolean, types.is_null)
            fits = types.is_null(kind) or (listed and any(test(kind.value_type) for test in numbers))
        if not fits:
            need = "text" if option == "text_field" else "lists of integers"
            raise UsageError(
                f"source {spec.name}: {location}: column {name!r} is of type {kind}, not of {need}; "
                f"set {option} to another column"
            )


def _values(source: SourceFiles, batch: Any) -> Iterator[Value]:
    if source.id_fields is not None:
        columns = [None if name is None else _column(batch, name) for name in source.id_fields]
        for row in range(batch.num_rows):
            yield _tokens(columns, row)
    elif source.takes_whole:
        for found in rows_of(batch):
            yield found if isinstance(found, Bad) else packed(found)
    else:
        assert isinstance(source, Parquet)
        from pyarrow import large_binary  # noqa: PLC0415

        # As bytes: one text that is not UTF-8 must not make its neighbours unreadable.
        for text in _column(batch, source.text_field).cast(large_binary()).to_pylist():
            yield text_of(text, source.text_field)


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


def rows_of(batch: Any) -> Iterator[dict[str, Any] | Bad]:
    """The rows of a batch of Arrow's, as Python's values. Times that Python has no value for are text."""
    has_nanoseconds = any(_changed(field.type) != field.type for field in batch.schema)
    for row in range(batch.num_rows):
        yield _object(batch.slice(row, 1), has_nanoseconds=has_nanoseconds)


def _object(row: Any, *, has_nanoseconds: bool) -> dict[str, Any] | Bad:
    from pyarrow import ArrowInvalid, RecordBatch, string  # noqa: PLC0415

    def cast(column: Any, text: Any = None) -> Any:
        try:
            return column.cast(_changed(column.type, text))
        except ArrowInvalid:  # nanoseconds that microseconds cannot say
            return column.cast(_changed(column.type, string()))

    try:
        if has_nanoseconds:
            row = RecordBatch.from_arrays([cast(column) for column in row.columns], names=row.schema.names)
        try:
            (value,) = row.to_pylist()
        except UnicodeDecodeError:
            raise
        except (ValueError, OverflowError):  # a date beyond 9999
            columns = [cast(column, string()) for column in row.columns]
            (value,) = RecordBatch.from_arrays(columns, names=row.schema.names).to_pylist()
    except UnicodeDecodeError as error:
        return Bad(f"not UTF-8 ({error.reason})")
    found: dict[str, Any] = value
    return found


def _changed(kind: Any, text: Any = None) -> Any:
    """The type with `text` in place of times; with microseconds in place of nanoseconds, by default."""
    from pyarrow import duration, list_, struct, time64, timestamp, types  # noqa: PLC0415

    if types.is_temporal(kind) and text is not None:
        return text
    if getattr(kind, "unit", "us") == "ns":
        zoned = timestamp("us", getattr(kind, "tz", None))
        return zoned if types.is_timestamp(kind) else duration("us") if types.is_duration(kind) else time64("us")
    if types.is_list(kind):
        return list_(_changed(kind.value_type, text))
    if types.is_struct(kind):
        return struct([(field.name, _changed(field.type, text)) for field in kind])
    return kind
