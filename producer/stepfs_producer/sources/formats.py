"""The formats of sources, by name, and the one of lines and whole files of text, compressed ones too."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from stepfs_producer.plan.sources import Source, Table, Text
from stepfs_producer.sources.compressed import check_kind, decompressed, is_compressed, with_compressed
from stepfs_producer.sources.custom import own_format
from stepfs_producer.sources.files import Format, OpenFile, open_listed
from stepfs_producer.sources.megatron import MegatronFormat
from stepfs_producer.sources.parquet import ParquetFormat
from stepfs_producer.sources.record import (
    RECORD_BYTES_MAX,
    Fragment,
    Kind,
    Line,
    Raw,
    SourceSpec,
    Unit,
    Value,
    json_line,
    kind_of,
    text_file,
    text_line,
)
from stepfs_producer.sources.tables import TABLES, csv_format

_PIECE_BYTES: Final = 4 << 20
TAIL_BYTES: Final = 64 << 10
PIECE_BYTES: Final = 1 << 20


def lines_between(read: Callable[[int, int], bytes], begin: int, end: int, size: int) -> Iterator[Line]:
    """Non-blank lines of a file of `size` bytes that begin in [begin, end)."""
    inside = begin > 0  # the byte before decides whether a line begins here
    return split_lines(reads_from(read, begin - inside, end, size), begin - inside, end, inside=inside)


def reads_from(read: Callable[[int, int], bytes], begin: int, end: int, size: int) -> Iterator[bytes]:
    """The range and a little more, so that a usual one is one request; then the rest of the file, in growing reads."""
    end = min(end + TAIL_BYTES, size)
    while begin < end:
        yield read(begin, min(begin + _PIECE_BYTES, end))
        begin = min(begin + _PIECE_BYTES, end)
    more = TAIL_BYTES
    while begin < size:
        yield read(begin, min(begin + more, size))
        begin = min(begin + more, size)
        more = min(2 * more, _PIECE_BYTES)


def split_lines(
    pieces: Iterable[bytes], offset: int, end: int | None = None, *, inside: bool = False
) -> Iterator[Line]:
    """Non-blank lines that begin before `end` in bytes from `offset` on. `inside`: the first line began before them."""
    held: list[bytes] = []
    start, held_bytes, too_long = offset, 0, False
    for piece in pieces:
        place = 0
        while place < len(piece):
            if end is not None and (offset + place if inside else start) >= end:
                return
            newline = piece.find(b"\n", place)
            stop = newline if newline >= 0 else len(piece)
            if not inside:
                held_bytes += stop - place
                too_long = held_bytes > RECORD_BYTES_MAX
                if too_long:
                    held.clear()
                else:
                    held.append(piece[place:stop])
            place = stop + 1
            if newline >= 0:
                if not inside:
                    yield from _line(start, held_bytes, None if too_long else b"".join(held))
                start, held, held_bytes, too_long, inside = offset + place, [], 0, False, False
        offset += len(piece)
    if held_bytes and (end is None or start < end):
        yield from _line(start, held_bytes, None if too_long else b"".join(held))


def _line(offset: int, count: int, data: bytes | None) -> Iterator[Line]:
    if data is None:
        yield Line(offset, count, None)
        return
    if not offset:
        data = data.removeprefix(codecs.BOM_UTF8)
    if data and not data.isspace():
        yield Line(offset, count, data.removesuffix(b"\r"))


def pieces_between(read: Callable[[int, int], bytes], begin: int, end: int, size: int) -> Iterator[Line]:
    """The pieces of a file of `size` bytes whose MiB begins in [begin, end)."""
    first = -(-begin // PIECE_BYTES) * PIECE_BYTES
    if first < min(end, size):
        before = max(first - 1, 0)  # the byte before decides whether a line begins here
        yield from split_pieces(reads_from(read, before, end, size), first, min(end, size))


def split_pieces(reads: Iterable[bytes], first: int = 0, end: int | None = None) -> Iterator[Line]:
    """The pieces whose MiB begins in [first, end), in bytes from `first` on, with the one before it."""
    held = b""
    offset = max(first - 1, 0)  # of `held`
    wanted = first or PIECE_BYTES  # where the next cut is looked for
    inside = first > 0  # in a piece that began before
    for more in chain(reads, (None,)):
        held += more or b""
        while held and (more is None or len(held) >= wanted - offset + TAIL_BYTES):
            stop = _cut(held, wanted - offset)
            if not inside:
                yield Line(offset, stop, held[:stop] if offset else held[:stop].removeprefix(codecs.BOM_UTF8))
            if end is not None and wanted >= end:
                return
            held, offset, inside = held[stop:], offset + stop, False
            wanted += PIECE_BYTES


def _cut(held: bytes, wanted: int) -> int:
    """The end of a piece that is looked for at `wanted`."""
    newline = held.find(b"\n", wanted - 1, wanted + TAIL_BYTES)
    if newline >= 0:
        return newline + 1
    if len(held) < wanted + TAIL_BYTES:
        return len(held)  # the file ends here
    while held[wanted] & 0xC0 == 0x80:  # within a character; at most thrice in text
        wanted += 1
    return wanted


@dataclass(frozen=True)
class LineFormat(Format):
    """JSONL or text, plain, `.gz` or `.zst`: a record is a line that is not blank, or a file."""

    json: bool = False
    whole: bool = False  # records are files, or long pieces of them
    suffixes: tuple[str, ...] = ()

    def kind(self, spec: SourceSpec) -> Kind:
        return kind_of(spec.source) if self.json else Kind.TEXT

    def unit(self, name: str) -> Unit:
        return Unit.WHOLE if is_compressed(name) else Unit.RANGES

    def parts(self, spec: SourceSpec, file: OpenFile) -> Sequence[tuple[int, int]]:  # noqa: ARG002
        check_kind(file)
        return ()

    def records(self, spec: SourceSpec, fragment: Fragment) -> Iterator[Raw]:
        with open_listed(spec, fragment.ref) as file:
            if is_compressed(file.location):
                decoded = decompressed(file)
                found = split_pieces(decoded) if self.whole else split_lines(decoded, 0)
            else:
                between = pieces_between if self.whole else lines_between
                found = between(file.read, fragment.begin, fragment.end, file.size)
            for line in found:
                yield Raw(fragment.file, line.offset, line.length, line)

    def decode(self, spec: SourceSpec, stored: Any) -> Value:
        if self.json:
            return json_line(spec.source, stored)
        return text_file(stored) if self.whole else text_line(stored)


_FORMATS: dict[str, Format] = {
    "jsonl": LineFormat(json=True, suffixes=with_compressed(".jsonl", ".ndjson", ".json")),
    "text": LineFormat(),
    "parquet": ParquetFormat(),
    "megatron": MegatronFormat(),
    **TABLES,
}


_WHOLE_FILES: Final = LineFormat(whole=True)


def format_of(spec: SourceSpec) -> Format:
    """The format of a source. `UsageError` if there is no such class, or a library is missing."""
    source = spec.source
    if isinstance(source, Text) and source.records == "files":
        return _WHOLE_FILES
    if isinstance(source, Source):
        return own_format(source.format, tuple(sorted(source.options.items())))
    if isinstance(source, Table) and source.delimiter is not None:
        return csv_format(source.delimiter)
    return _FORMATS[source.format]
