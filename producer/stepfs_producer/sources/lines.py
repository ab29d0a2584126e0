"""Byte ranges of text → the lines that begin in them. Every line of a file begins in exactly one range.

Lines end at "\\n"; a "\\r" before it belongs to the end. The last line needs none. A byte order mark at the beginning
of a file is no part of its first line. Blank lines are no records. A line above `RECORD_BYTES_MAX` is found, but its bytes
are never held.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

RECORD_BYTES_MAX: Final = 64 << 20
_PIECE_BYTES: Final = 4 << 20
TAIL_BYTES: Final = 64 << 10


class Line(NamedTuple):
    """A line without its end. `data` None: too long."""

    offset: int
    length: int  # bytes
    data: bytes | None


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
