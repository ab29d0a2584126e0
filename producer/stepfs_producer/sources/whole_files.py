"""Files of text whose records are the files: one record each, and pieces of about 1 MiB of a longer one.

A piece ends at the first line end at or behind each MiB of its file. Where 64 KiB hold no line end, it ends before the
next character. So a cut depends on the bytes around it alone: every byte range of a file finds the same pieces, memory is
bounded, and a large file is dealt to several workers and shards. A byte order mark is no part of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final

from stepfs_producer.sources.lines import TAIL_BYTES, Line, reads_from

PIECE_BYTES: Final = 1 << 20


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
