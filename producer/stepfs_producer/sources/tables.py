"""Formats whose files are read from the beginning: Arrow, CSV and TSV, arrays of JSON, shards of WebDataset.

Each is a class as users write them (`sources.own`): `records(file, part)` yields the place of a record and its fields.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import tarfile
from collections.abc import Iterator
from itertools import count
from typing import Any, BinaryIO, Final

from stepfs.errors import CorruptError, MissingPackageError, StepfsError
from stepfs_producer.sources.custom import OwnFormat
from stepfs_producer.sources.record import RECORD_BYTES_MAX, Bad

Found = Iterator[tuple[int, Any]]
_PIECE: Final = 1 << 20
_BETWEEN: Final = " \t\r\n,"


class Csv:
    """Rows by the names of the first one. Every value is text."""

    suffixes = (".csv", ".tsv")

    def records(self, file: BinaryIO, part: int) -> Found:  # noqa: ARG002
        csv.field_size_limit(RECORD_BYTES_MAX)
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        first = text.readline()
        delimiter = "\t" if "\t" in first and "," not in first else ","
        header = next(csv.reader([first], delimiter=delimiter, strict=True), [])
        for number, row in enumerate(csv.reader(text, delimiter=delimiter, strict=True)):
            if row and len(row) != len(header):
                yield number, Bad(f"{len(row)} values, and the first line names {len(header)}")
            elif row:
                yield number, dict(zip(header, row, strict=True))


class JsonArray:
    """The objects of one array, or one after the other."""

    suffixes = (".json",)

    def records(self, file: BinaryIO, part: int) -> Found:  # noqa: ARG002
        decoder, held, numbers, ended = json.JSONDecoder(), "", count(), False
        decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        begun = False
        while not ended:
            piece = file.read(_PIECE)
            ended = not piece
            held += decode(piece, final=ended)
            if not begun and held.strip():
                held, begun = held.lstrip().removeprefix("["), True
            place = 0
            while begun:
                while place < len(held) and held[place] in _BETWEEN:
                    place += 1
                if place == len(held) or held[place] == "]":
                    break
                try:
                    value, place = decoder.raw_decode(held, place)
                except json.JSONDecodeError:
                    if ended or len(held) - place > RECORD_BYTES_MAX:
                        raise
                    break
                yield next(numbers), value if isinstance(value, dict) else Bad("not a JSON object")
            held = held[place:]


class Arrow:
    """IPC files and streams, also those that `datasets` saves to disk."""

    suffixes = (".arrow", ".feather", ".ipc")

    def records(self, file: BinaryIO, part: int) -> Found:  # noqa: ARG002
        try:
            from pyarrow import ipc  # noqa: PLC0415 - optional
        except ImportError as error:
            raise MissingPackageError("Arrow files need the package pyarrow: pip install 'stepfs[parquet]'") from error
        from stepfs_producer.sources.parquet import rows_of  # noqa: PLC0415

        numbers = count()
        begin = file.read(6)
        file.seek(0)
        if begin == b"ARROW1":
            whole = ipc.open_file(file)
            batches: Any = map(whole.get_batch, range(whole.num_record_batches))
        else:
            batches = ipc.open_stream(file)
        for batch in batches:
            for row in rows_of(batch):
                yield next(numbers), row


class WebDataset:
    """Samples of a tar: members that differ in what follows the first dot of their names, which names the field."""

    suffixes = (".tar",)

    def records(self, file: BinaryIO, part: int) -> Found:  # noqa: ARG002
        key, begin, sample = "", 0, dict[str, Any]()
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                directory, _, name = member.name.rpartition("/")
                stem, _, field = name.partition(".")
                if not member.isfile() or not stem or not field:
                    continue
                if sample and f"{directory}/{stem}" != key:
                    yield begin, sample
                    sample = {}
                if not sample:
                    key, begin = f"{directory}/{stem}", member.offset
                content = archive.extractfile(member)
                assert content is not None
                sample[field] = _field(field, content.read())
        if sample:
            yield begin, sample


def _field(name: str, data: bytes) -> object:
    """The value that WebDataset decodes of the types that every program knows; bytes of others."""
    kind = name.rpartition(".")[2].lower()
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

    def _refused(self, location: str, error: Exception) -> StepfsError:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return CorruptError(f"{location}: damaged {self._name} ({reason}); replace it or leave it out")


TABLES: Final = {
    "arrow": TableFormat("Arrow", Arrow()),
    "csv": TableFormat("CSV", Csv()),
    "json": TableFormat("JSON", JsonArray()),
    "webdataset": TableFormat("tar", WebDataset()),
}
