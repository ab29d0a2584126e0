"""Text files → records, streaming, from any place in a corpus.

A record becomes one document of the packed stream: a line of a `.jsonl`, or a text file, cut near line
ends into pieces of at most `RECORD_BYTES` so that memory is bounded and one big file still spreads over all
shards. Where a record begins and which shard it belongs to depend on the bytes of its file alone. `.gz` is
decompressed on the way; offsets count decompressed bytes, so resuming inside an archive reads it again from its start.

Sources must not change while they are being produced; what resuming can notice of that (a file that is gone, shorter
than the place in it, or begins otherwise) is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Final, cast

from stepfs.errors import AbsentError, RefusedError, StepfsError, UsageError
from stepfs_producer.sources.listing import SourceFile
from stepfs_producer.text.finished import FinishedFiles

RECORD_BYTES: Final = 1 << 20
LINE_BYTES_MAX: Final = 16 << 20
_SNIFF_BYTES: Final = 8192
_HEAD_BYTES: Final = 64 << 10
_JSON_LINES: Final = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the next record begins: `offset` bytes into the (decompressed) file `name`, `lines` lines before it."""

    name: str
    offset: int
    lines: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count`: every record belongs to exactly one."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(
                f"shard {self.index}/{self.count} does not exist; indices run from 0 to count - 1"
            )

    def holds(self, document: str, start: int) -> bool:
        """Deal records by hash, not in turn: changes in one file do not move the records of another."""
        if self.count == 1:
            return True
        digest = hashlib.blake2b(f"{document}\0{start}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.count == self.index


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes of one document of the corpus, and the places before and after it."""

    document: str  # the file's name, or name:line of a JSON record
    start: int  # offset of data[0] in the document
    data: bytes
    here: Place
    after: Place


class TextSource:
    """The records of one shard of a corpus, in order of names and offsets."""

    def __init__(
        self,
        files: tuple[SourceFile, ...],
        *,
        shard: Shard = Shard(),
        text_field: str = "text",
        record_bytes: int = RECORD_BYTES,
    ) -> None:
        self._files = files
        self._names = [file.name for file in files]
        self.shard = shard
        self._text_field = text_field
        self.text_field = (
            text_field if any(map(_is_json_lines, self._names)) else None
        )  # None: no file has fields
        self._record_bytes = record_bytes
        self.skipped: set[str] = set()  # names of files met that hold no text
        self.finished = FinishedFiles()
        self.passed = 0  # records met that belong to other shards
        self._head = ("", b"")  # name and first bytes of the file requested last

    def file_number(self, name: str) -> int:
        """The number of files of the corpus before `name`."""
        return bisect_left(self._names, name)

    def holds(self, name: str) -> bool:
        """Whether a file of that name is part of the corpus."""
        number = self.file_number(name)
        return number < len(self._files) and self._names[number] == name

    def grown(self, finished: FinishedFiles, place: Place) -> list[str]:
        """Names of files that grew after they were finished, and whose new bytes a producer at `place` does not read.

        The file at `place` goes on; but what is added to its last record belongs to a shard by another hash, so
        with more shards than one it may be nobody's.
        """
        at = self.file_number(place.name)
        cut = self.shard.count > 1 and not _is_json_lines(place.name)
        return finished.grown(self._files[: at + cut])

    def head(self, place: Place) -> str:
        """Digest of the file's bytes before `place`, at most 64 KiB: distinguishes it from another file of its
        name."""
        name, known = self._head
        if name != place.name or len(known) < min(place.offset, _HEAD_BYTES):  # of a file that grows
            file = self._files[self._number_of(place)]
            with _reading(file, compressed=_is_compressed(file)) as stream:
                self._head = (place.name, stream.read(_HEAD_BYTES))
        return hashlib.blake2b(self._head[1][: place.offset], digest_size=8).hexdigest()

    def check(self, place: Place, head: str) -> None:
        """`RefusedError` unless the file at `place` is there and began with `head`; "" is not known and fits any."""
        file = self._files[self._number_of(place)]
        if head and self.head(place) != head:
            raise RefusedError(
                f"{file.path} does not begin like the {place.name} in which this producer stopped; restore that, or "
                "begin again under a new producer id"
            )

    def _number_of(self, place: Place) -> int:
        number = self.file_number(place.name)
        if not self.holds(place.name):
            raise RefusedError(
                f"the source {place.name}, where this producer stopped, is not among the inputs any more; "
                "restore it, or begin again under a new producer id"
            )
        return number

    def records(self, start: Place | None = None) -> Iterator[Record]:
        """The shard's records from `start` on. `RefusedError` when the place is no longer there."""
        first = 0 if start is None else self._number_of(start)
        for file in self._files[first:]:
            place = start if start is not None and file.name == start.name else Place(file.name, 0, 0)
            for record in self._records_of(file, place):
                if self.shard.holds(record.document, record.start):
                    yield record
                else:
                    self.passed += 1

    def _records_of(self, file: SourceFile, place: Place) -> Iterator[Record]:
        compressed = _is_compressed(file)
        with _reading(file, compressed=compressed) as stream:
            if not file.named and b"\0" in stream.read(_SNIFF_BYTES):
                self.skipped.add(file.name)
                return
            stored_bytes = os.fstat(stream.fileno()).st_size
            _go_to(stream, place.offset, file, compressed=compressed)
            if _is_json_lines(file.name):
                yield from _json_records(stream, file, place, self._text_field)
            else:
                yield from _text_records(stream, place, self._record_bytes)
            # What a plain file held when its end was reached is known exactly; an archive grows by being appended to.
            self.finished.add(file.name, stored_bytes if compressed else stream.tell())


def _is_json_lines(name: str) -> bool:
    return name.removesuffix(".gz").endswith(_JSON_LINES)


def _is_compressed(file: SourceFile) -> bool:
    return file.name.endswith(".gz")


def _go_to(stream: BinaryIO, offset: int, file: SourceFile, *, compressed: bool) -> None:
    # A plain file seeks anywhere, so check its end; a gzip stream stops where its data ends.
    end = stream.seek(offset) if compressed else stream.seek(0, os.SEEK_END)
    if end < offset:
        raise RefusedError(f"{file.path} is shorter than when this producer stopped in it; restore it")
    stream.seek(offset)


def _text_records(stream: BinaryIO, place: Place, record_bytes: int) -> Iterator[Record]:
    """Pieces of a text file. Each is a function of the bytes from its own start: resuming cannot shift a cut."""
    rest = b""
    while window := rest + stream.read(record_bytes - len(rest)):
        cut = len(window) if len(window) < record_bytes else _cut_before(window)
        piece, rest = window[:cut], window[cut:]
        after = Place(place.name, place.offset + cut, place.lines + piece.count(b"\n"))
        yield Record(place.name, place.offset, piece, place, after)
        place = after


def _cut_before(window: bytes) -> int:
    """Where to cut a full window: after a line in its second half, else between characters, never at 0."""
    line = window.rfind(b"\n", len(window) // 2) + 1
    if line:
        return line
    for cut in range(len(window), max(len(window) - 4, 1), -1):
        if window[cut - 1] < 0x80:
            return cut
        if window[cut - 1] >= 0xC0:  # a character begins here; whether it is complete is not worth knowing
            return cut - 1
    return len(window)


def _json_records(stream: BinaryIO, file: SourceFile, place: Place, text_field: str) -> Iterator[Record]:
    while line := stream.readline(LINE_BYTES_MAX + 1):
        after = Place(place.name, place.offset + len(line), place.lines + 1)
        document = f"{place.name}:{after.lines}"
        if len(line) > LINE_BYTES_MAX:
            raise UsageError(
                f"{file.path}:{after.lines}: line longer than {LINE_BYTES_MAX} bytes; split the record"
            )
        if line.strip():
            yield Record(document, 0, _text_of(line, text_field, f"{file.path}:{after.lines}"), place, after)
        place = after


def _text_of(line: bytes, text_field: str, where: str) -> bytes:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON ({error}); repair the line or leave the file out") from error
    text = value.get(text_field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UsageError(
            f"{where}: no text in the field {text_field!r}; name the right one with --text-field"
        )
    return text.encode("utf-8", "surrogatepass")


@contextmanager
def _reading(file: SourceFile, *, compressed: bool) -> Iterator[BinaryIO]:
    """The file's bytes, with what the operating system or zlib raise as one line that says what to do."""
    try:
        with gzip.open(file.path, "rb") if compressed else open(file.path, "rb") as stream:  # noqa: PTH123
            yield cast("BinaryIO", stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{file.path}: damaged gzip ({error}); replace it or leave it out") from error
    except FileNotFoundError as error:
        raise AbsentError(f"{file.path} disappeared while it was being produced; restore it") from error
    except PermissionError as error:
        raise RefusedError(
            f"{file.path} is not readable; change its mode or leave it out of the inputs"
        ) from error
    except OSError as error:
        raise StepfsError(f"{file.path}: {error.strerror or error}; the source could not be read") from error
