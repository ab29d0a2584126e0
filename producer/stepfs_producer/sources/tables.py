"""Formats whose files are read from the beginning: Arrow, CSV and TSV, arrays of JSON, shards of WebDataset.

Each is a class as users write them (`sources.own`): `records(file, part)` yields the place of a record and its fields.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import lru_cache
from itertools import chain, count
from typing import Any, BinaryIO, Final, Self

from stepfs.errors import AbsentError, CorruptError, MissingPackageError, StepfsError, UsageError
from stepfs_producer.plan.sources import SourceFiles
from stepfs_producer.sources.compressed import check_kind, is_compressed, opened, with_compressed
from stepfs_producer.sources.custom import OwnFormat
from stepfs_producer.sources.files import FoundFile, OpenFile, Stream, open_file
from stepfs_producer.sources.record import RECORD_BYTES_MAX, Bad, SourceSpec, Value

Found = Iterator[tuple[int, Any]]
_PIECE: Final = 1 << 20
_BETWEEN: Final = re.compile(r"[ \t\r\n,]*")
_DIGITS: Final = re.compile(r"[-+.0-9eE]*")
_END: Final = "\ud800"  # which no decoded text has
_META: Final = re.compile(r"__[^/]*__($|/)")  # as WebDataset knows members that are no samples
_CACHE: Final = re.compile(
    r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow"
)  # as datasets calls what it keeps beside the data
_STATE: Final = "state.json"
_SPLITS: Final = "dataset_dict.json"
_BESIDE: Final = (_STATE, _SPLITS)
_ARROW: Final = b"ARROW1"


class _UnfitError(Exception):
    """The file is sound, and cannot be read as it is: the sentence says what to do."""


class Csv:
    """Rows by the names of the first one. Every value is text. Odd quotes are read as pandas reads them."""

    suffixes = with_compressed(".csv", ".tsv")

    def __init__(self, delimiter: str | None = None) -> None:
        self._delimiter = delimiter

    def records(self, file: BinaryIO, part: int) -> Found:  # noqa: ARG002
        csv.field_size_limit(RECORD_BYTES_MAX)
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        first = text.readline()
        delimiter = self._delimiter or ("\t" if "\t" in first and "," not in first else ",")
        rows = _up_to_end(csv.reader(chain([first], text, [_END]), delimiter=delimiter))
        header = next(rows, [])
        if twice := [name for name in header if name and header.count(name) > 1]:
            raise _UnfitError(f"two columns are called {twice[0]!r}; rename one")
        for number, row in enumerate(rows):
            if row and len(row) != len(header):
                yield number, Bad(f"{len(row)} values, and the first line names {len(header)}")
            elif row:
                yield number, dict(zip(header, row, strict=True))


def _up_to_end(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """The rows before the one that was put behind the last; it is within a field if a quote is open."""
    for row in rows:
        if row and row[-1].endswith(_END):
            if row != [_END]:
                raise ValueError("a quote is open up to its end")
            return
        yield row


class JsonArray:
    """The objects of arrays, or one after the other, up to the end of the file."""

    suffixes = with_compressed(".json")

    def records(self, file: BinaryIO, part: int) -> Found:  # noqa: ARG002
        decoder, held, numbers, ended, inside, enough = json.JSONDecoder(), "", count(), False, False, 0
        decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        # What is there, so that nothing of it is lost where the rest is damaged.
        read = getattr(file, "read1", file.read)
        while not ended:
            piece = read(_PIECE)
            ended = not piece
            held += decode(piece, final=ended)
            if len(held) < enough and not ended:
                continue
            place, enough = _behind(_BETWEEN, held, 0), 0
            while place < len(held):
                if held[place] == ("]" if inside else "["):
                    inside, place = not inside, _behind(_BETWEEN, held, place + 1)
                    continue
                try:
                    value, end = decoder.raw_decode(held, place)
                except json.JSONDecodeError:
                    if ended or len(held) - place > RECORD_BYTES_MAX:
                        raise
                    enough = 2 * (len(held) - place)  # a long value is looked at a few times only
                    break
                if not ended and _behind(_DIGITS, held, end) == len(held):
                    break  # of a number more may follow
                yield next(numbers), value if isinstance(value, dict) else Bad("not a JSON object")
                place = _behind(_BETWEEN, held, end)
            held = held[place:]
        if inside:
            raise ValueError("it ends within an array")


def _behind(what: re.Pattern[str], text: str, place: int) -> int:
    found = what.match(text, place)
    assert found is not None, "nothing matches, too"
    return found.end()


class _Member(tarfile.TarInfo):
    """A member, of an archive that proves its end: `tarfile` takes what is none for the end, and so a cut shard for whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if not buf:
            raise ValueError("it ends without the blocks that end a tar")
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise ValueError(f"no member where one should begin: {error}") from error


class WebDataset:
    """Samples of a tar: members that differ in what follows the first dot of their names, which names the field."""

    suffixes = with_compressed(".tar")

    def records(self, file: BinaryIO, part: int) -> Found:  # noqa: ARG002
        key, begin, size = "", 0, 0
        sample: dict[str, Any] | Bad = {}
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as archive:
            for member in archive:
                directory, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                field = ending.lower()
                if not member.isfile() or not stem or not field or _META.match(member.name):
                    continue
                if sample and f"{directory}/{stem}" != key:
                    yield begin, sample
                    sample, size = {}, 0
                if not sample:
                    key, begin = f"{directory}/{stem}", member.offset
                size += member.size
                if isinstance(sample, Bad):
                    continue
                if field in sample:
                    sample = Bad(f"two members are the field {field!r}, the second {member.name}")
                elif size > RECORD_BYTES_MAX:
                    sample = Bad(f"members of {size} bytes or more; at most {RECORD_BYTES_MAX} of a sample are read")
                else:
                    content = archive.extractfile(member)
                    assert content is not None
                    sample[field] = _field(field, content.read())
        if sample:
            yield begin, sample


def _field(name: str, data: bytes) -> object:
    """The value that WebDataset decodes of the types that every program knows; bytes of others."""
    kind = name.rpartition(".")[2]
    try:
        if kind in {"txt", "text", "transcript"}:
            return data.decode()
        if kind == "json":
            return json.loads(data)
        if kind in {"cls", "cls2", "index", "inx", "id"}:
            return int(data)
    except ValueError:
        pass
    return data


class TableFormat(OwnFormat):
    """One of the classes above; what its library refuses is damage of the file."""

    def parts(self, spec: SourceSpec, file: OpenFile) -> Sequence[tuple[int, int]]:  # noqa: ARG002
        check_kind(file)
        return ()

    def _opened(self, file: OpenFile) -> AbstractContextManager[tuple[BinaryIO, Stream]]:
        return opened(file)

    def _refused(self, location: str, error: Exception) -> StepfsError:
        if isinstance(error, _UnfitError):
            return UsageError(f"{location}: {error}")
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return CorruptError(f"{location}: damaged {self._name} ({reason}); replace it or leave it out")


class Arrow:
    """IPC files and streams: each row as a batch of one."""

    suffixes = (".arrow", ".feather", ".ipc", *_BESIDE)

    def records(self, file: BinaryIO, part: int) -> Found:  # noqa: ARG002
        _, batches = _batches(file)
        yield from enumerate(batch.slice(row, 1) for batch in batches for row in range(batch.num_rows))


def _batches(file: BinaryIO) -> tuple[Any, Iterator[Any]]:
    """The schema and the batches of an Arrow file."""
    try:
        from pyarrow import ipc  # noqa: PLC0415 - optional
    except ImportError as error:
        raise MissingPackageError("Arrow files need the package pyarrow: pip install 'stepfs[parquet]'") from error
    begin = file.read(len(_ARROW))
    file.seek(0)
    if begin == _ARROW:
        whole = ipc.open_file(file)
        return whole.schema, map(whole.get_batch, range(whole.num_record_batches))
    stream = ipc.open_stream(file)
    return stream.schema, iter(stream)


class ArrowFormat(TableFormat):
    """Arrow files; of a directory that `datasets` saved, those of its data."""

    def parts(self, spec: SourceSpec, file: OpenFile) -> Sequence[tuple[int, int]]:
        from stepfs_producer.sources.parquet import check_columns  # noqa: PLC0415

        if is_compressed(file.location):
            raise UsageError(f"{file.location}: an Arrow file is read as it was written; decompress it")
        check_kind(file)
        with self._opened(file) as (stream, raw), self._own_code(file.location, raw):
            schema = _batches(stream)[0] if file.size else None
        if schema is not None:
            check_columns(spec, file.location, schema)
        return ()

    def _value(self, source: SourceFiles, stored: Any) -> Value:
        from stepfs_producer.sources.parquet import values_of  # noqa: PLC0415

        (value,) = values_of(source, stored)
        return value

    def choose(self, spec: SourceSpec, found: Sequence[FoundFile]) -> list[FoundFile]:
        """Without what `datasets` keeps beside its data: caches of `map` and of indices. `UsageError` for several splits."""
        known = {file.location: _object_in(spec, file) for file in found if _name(file) in _BESIDE}
        for location, about in known.items():
            splits = about.get("splits", [])
            if location.endswith(_SPLITS) and len(splits) > 1:
                above = location.removesuffix(_SPLITS)
                raise UsageError(
                    f"source {spec.name}: {above} has the splits {', '.join(splits)}; name the directory of one: {above}{splits[0]}/"
                )
        kept = [file for file in found if _name(file) not in _BESIDE]
        for location, about in known.items():
            if location.endswith(_STATE) and "_data_files" in about:
                above = location.removesuffix(_STATE)
                data = {above + one["filename"] for one in about["_data_files"]}
                if missing := sorted(data - {file.location for file in kept}):
                    raise AbsentError(
                        f"source {spec.name}: {location} names {missing[0]}, which is not there; save it anew"
                    )
                kept = [file for file in kept if _above(file) != above or file.location in data]
        named = {entry.rpartition("/")[2] for entry in spec.source.files}
        return [file for file in kept if not _CACHE.fullmatch(_name(file)) or _name(file) in named]


def _name(file: FoundFile) -> str:
    return file.location.rpartition("/")[2]


def _above(file: FoundFile) -> str:
    return file.location.removesuffix(_name(file))


def _object_in(spec: SourceSpec, found: FoundFile) -> Mapping[str, Any]:
    with closing(open_file(spec, found.location, found.size, etag=found.etag)) as file:
        try:
            value = json.loads(file.read(0, file.size))
        except ValueError as error:
            raise CorruptError(f"{found.location}: damaged JSON ({error}); save the data set anew") from error
    return value if isinstance(value, dict) else {}


@lru_cache(maxsize=16)
def csv_format(delimiter: str | None = None) -> TableFormat:
    """CSV with this delimiter; None: tabs or commas, as the first line says."""
    return TableFormat("CSV", Csv(delimiter))


TABLES: Final = {
    "arrow": ArrowFormat("Arrow", Arrow()),
    "csv": csv_format(),
    "json": TableFormat("JSON", JsonArray()),
    "webdataset": TableFormat("tar", WebDataset()),
}
