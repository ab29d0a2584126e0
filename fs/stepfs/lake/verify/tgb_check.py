"""Checking one TGB object from its bytes in order, without holding them.

A sequential consumer: `feed` it consecutive pieces of any size, then `finish`. It computes the CRC32C of each slice
and of each block on the way; it keeps the index and footer, a few bytes per slice, and compares them with the log.
The padding between them must be the zeros that were written: no checksum covers it, and a rotten bit there is a
warning.
"""

from __future__ import annotations

from typing import Final

from crc32c import crc32c

from stepfs.errors import StepfsError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex
from stepfs.format.records import HEAD_BYTES, payload_problem
from stepfs.format.tgb import (
    ALIGNMENT_BYTES,
    FOOTER_BYTES,
    HEADER,
    Descriptor,
    SliceRef,
    read_footer,
    read_header,
    read_index,
)

Problem = tuple[int | None, str]  # (slice, or None for the object as a whole; description)

_EMPTY: Final = crc32c(b"")


class TgbCheck:
    """One object described by `tgb`. Not thread-safe; CPU-bound, so call `feed` in a worker thread.

    `content`: the extension whose signature each slice must have; "" accepts any bytes.
    """

    def __init__(self, tgb: Descriptor, *, content: str = "") -> None:
        self._tgb = tgb
        self._content = content
        self._first = bytearray()  # bytes of the current slice
        slices = [(tgb.slice(SliceIndex(index)), index) for index in range(tgb.slices)]
        self._slices = sorted(slices, key=lambda pair: (pair[0].offset, pair[1]))
        self._tail_from = max(ref.offset + ref.length for ref, _ in slices)
        self._next = 0  # slices before this one are complete
        self._offset = 0
        self._crc = _EMPTY
        self._block_crc = _EMPTY
        self._blocks: list[int] = []
        self._end = ALIGNMENT_BYTES  # of the header, then of the slice before
        self._dirty = False  # a byte between the slices is not zero
        self._header = bytearray()
        self._tail = bytearray()
        self._problems: list[Problem] = []

    def feed(self, piece: memoryview) -> None:
        start, end = self._offset, self._offset + len(piece)
        self._offset = end
        if start < ALIGNMENT_BYTES:
            self._header += piece[: ALIGNMENT_BYTES - start]
        while self._next < len(self._slices):
            ref, index = self._slices[self._next]
            self._dirty |= any(piece[max(0, self._end - start) : max(0, ref.offset - start)])
            low, high = max(ref.offset, start), min(ref.offset + ref.length, end)
            if low < high:
                self._fold(ref, piece[low - start : high - start], low - ref.offset)
            if end < ref.offset + ref.length:
                break
            self._close(ref, index)
        if end > self._tail_from:
            self._tail += piece[max(0, self._tail_from - start) :]

    def finish(self) -> list[Problem]:
        """All problems of the object; call it after the last byte."""
        for ref, index in self._slices[self._next :]:
            self._problems.append((index, f"the object ends before byte {ref.offset + ref.length}"))
        try:
            self._check_frame()
        except StepfsError as error:
            self._problems.append((None, str(error)))
        return self._problems

    def _fold(self, ref: SliceRef, bytes_in: memoryview, at: int) -> None:
        """Bytes [at, at + len) of the current slice."""
        self._crc = crc32c(bytes_in, self._crc)
        if at < HEAD_BYTES:
            self._first += bytes_in[: HEAD_BYTES - at]
        if not ref.blocks:
            return
        while bytes_in:
            left = BLOCK_BYTES - at % BLOCK_BYTES
            part = bytes_in[:left]
            self._block_crc = crc32c(part, self._block_crc)
            at += len(part)
            bytes_in = bytes_in[left:]
            if at % BLOCK_BYTES == 0 or at == ref.length:
                self._blocks.append(self._block_crc)
                self._block_crc = _EMPTY

    def _close(self, ref: SliceRef, index: int) -> None:
        if self._crc != ref.crc32c:
            self._problems.append((index, "checksum mismatch"))
        elif tuple(self._blocks) != ref.blocks:
            self._problems.append((index, "the log's block checksums do not match a slice that is intact"))
        elif self._content:
            problem = payload_problem(self._content, bytes(self._first), ref.length)
            if problem is not None:
                self._problems.append((index, f"content: {problem}"))
        self._first = bytearray()
        self._crc = self._block_crc = _EMPTY
        self._blocks = []
        self._end = max(self._end, ref.offset + ref.length)
        self._next += 1

    def _check_frame(self) -> None:
        what = self._tgb.key
        read_header(bytes(self._header), what)
        if self._header != HEADER:
            self._problems.append((None, "the header is not as it was written"))
        if len(self._tail) < FOOTER_BYTES:
            read_footer(bytes(self._tail), size=self._offset, what=what)
        offset, length = read_footer(bytes(self._tail[-FOOTER_BYTES:]), size=self._offset, what=what)
        if offset < self._tail_from:
            self._problems.append((None, f"the index at {offset} overlaps slices that end at {self._tail_from}"))
            return
        start = offset - self._tail_from
        if self._dirty or any(self._tail[:start]):
            self._problems.append((None, "there are bytes where only padding should be"))
        index = read_index(bytes(self._tail[start : start + length]), size=self._offset, what=what)
        if (index.packed_slices, index.packed_blocks) != (self._tgb.packed_slices, self._tgb.packed_blocks):
            self._problems.append((None, "the object's own index disagrees with the log"))
        elif index.seq != self._tgb.seq:
            self._problems.append((None, f"the object says seq {index.seq}, the log {self._tgb.seq}"))
