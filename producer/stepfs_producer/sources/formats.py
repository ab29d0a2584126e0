"""The formats of sources, by name, and the one of lines and files of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stepfs.errors import UsageError
from stepfs_producer.sources import compressed
from stepfs_producer.sources.api import Format
from stepfs_producer.sources.block import Fragment, Kind, Unit
from stepfs_producer.sources.fields import Raw, Value, json_line, kind_of, text_file, text_line
from stepfs_producer.sources.files.opened import OpenFile, open_listed
from stepfs_producer.sources.lines import lines_between, split_lines
from stepfs_producer.sources.megatron import MegatronFormat
from stepfs_producer.sources.own import own_format
from stepfs_producer.sources.parquet import ParquetFormat
from stepfs_producer.sources.spec import SourceSpec
from stepfs_producer.sources.whole_files import pieces_between, split_pieces


@dataclass(frozen=True)
class LineFormat(Format):
    """JSONL or text, plain, `.gz` or `.zst`: a record is a line that is not blank, or a file."""

    json: bool = False
    whole: bool = False  # records are files, or long pieces of them
    suffixes: tuple[str, ...] = ()

    def kind(self, spec: SourceSpec) -> Kind:
        return kind_of(spec) if self.json else Kind.TEXT

    def unit(self, name: str) -> Unit:
        return Unit.WHOLE if compressed.is_compressed(name) else Unit.RANGES

    def parts(self, spec: SourceSpec, file: OpenFile) -> Sequence[tuple[int, int]]:  # noqa: ARG002
        if compressed.is_compressed(file.location):
            compressed.check(file)
        return ()

    def records(self, spec: SourceSpec, fragment: Fragment) -> Iterator[Raw]:
        with open_listed(spec, fragment.ref) as file:
            if compressed.is_compressed(file.location):
                decoded = compressed.pieces(file)
                found = split_pieces(decoded) if self.whole else split_lines(decoded, 0)
            else:
                between = pieces_between if self.whole else lines_between
                found = between(file.read, fragment.begin, fragment.end, file.size)
            for line in found:
                yield Raw(fragment.file, line.offset, line.length, line)

    def decode(self, spec: SourceSpec, stored: Any) -> Value:
        if self.json:
            return json_line(spec, stored)
        return text_file(stored) if self.whole else text_line(stored)


def _with_compressed(*suffixes: str) -> tuple[str, ...]:
    return tuple(suffix + more for suffix in suffixes for more in ("", *compressed.SUFFIXES))


_FORMATS: dict[str, Format] = {
    "jsonl": LineFormat(json=True, suffixes=_with_compressed(".jsonl", ".ndjson", ".json")),
    "text": LineFormat(),
    "parquet": ParquetFormat(),
    "megatron": MegatronFormat(),
}


_WHOLE_FILES: Final = LineFormat(whole=True)


def format_of(spec: SourceSpec) -> Format:
    """The format of a source. `UsageError` if there is none of that name, or its library is missing."""
    if spec.format == "text" and spec.records == "files":
        return _WHOLE_FILES
    if spec.format in _FORMATS:
        return _FORMATS[spec.format]
    if ":" in spec.format:
        return own_format(spec.format, tuple(sorted(spec.options.items())))
    raise UsageError(
        f"source {spec.name}: unknown format {spec.format!r}; write one of {', '.join(_FORMATS)}, or module:Class"
    )
