"""What commands print: aligned plain text, the same on a terminal and in a pipe, and JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from stepfs.format.ids import JSON_SCHEMA


def json_text(facts: Mapping[str, object], *, indent: int | None = 2) -> str:
    """A document of fs/JSON.md."""
    return json.dumps({"schema": JSON_SCHEMA, **facts}, indent=indent)


class Row(str):
    """A line of a table that knows its cells: a narrow screen shortens them."""

    __slots__ = ("cells",)
    cells: tuple[str, ...]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Row]:
    """Lines of a left-aligned table; nothing at all when there are no rows."""
    if rows:
        widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            line = Row("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            line.cells = tuple(row)
            yield line


def size_text(size: int) -> str:
    """Bytes in binary units with three digits: 1.50 GiB."""
    if size < 1024:
        return f"{size} B"
    value, units = size / 1024, ["PiB", "TiB", "GiB", "MiB", "KiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {units[-1]}"


def printable(text: str) -> str:
    """`text` without escape sequences for the terminal: any writer of the lake may have chosen it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def time_text(time_ms: int) -> str:
    """Milliseconds since 1970 as UTC, to the second; '-' for never. A time that no calendar has (a machine's clock was
    wrong) is shown as its seconds.
    """
    if not time_ms:
        return "-"
    seconds = time_ms // 1000
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):  # which one depends on the number and the platform
        return f"{seconds} s"
