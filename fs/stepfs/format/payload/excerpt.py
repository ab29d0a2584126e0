"""The ends of a payload: all that tells its arrays, however long it is.

Formats keep their tables at the beginning (`.npy`, `.safetensors`, the pickle of a `.pt`) or at the end (the directory of
a zip). `verify` streams slices of any size and keeps these two ends; a producer has the whole payload and looks at the
same bytes. So both come to the same finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEAD_BYTES_MAX: Final = 1 << 20
TAIL_BYTES_MAX: Final = 256 << 10

Buffer = bytes | bytearray | memoryview


class UnreadablePayloadError(ValueError):
    """The payload is not of its format, or its table of arrays is too large to look at; the message says which."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The first and last bytes of a payload of `length` bytes. They overlap, or are all of it, if it is short."""

    head: memoryview
    tail: memoryview
    length: int

    @classmethod
    def of(cls, payload: Buffer) -> Excerpt:
        """Of a payload in memory; nothing is copied."""
        view = memoryview(payload)
        return cls(view[:HEAD_BYTES_MAX], view[max(0, len(view) - TAIL_BYTES_MAX) :], len(view))

    def has(self, offset: int, size: int) -> bool:
        return offset + size <= len(self.head) or offset >= self.length - len(self.tail)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size). `UnreadablePayloadError` if they are not at one of the ends."""
        end, tail_from = offset + size, self.length - len(self.tail)
        if min(offset, size) < 0 or end > self.length:
            raise UnreadablePayloadError(f"ends at byte {self.length}, and byte {end} is needed")
        if end <= len(self.head):
            return bytes(self.head[offset:end])
        if offset >= tail_from:
            return bytes(self.tail[offset - tail_from : end - tail_from])
        raise UnreadablePayloadError(
            f"has a table of arrays that does not lie in its first {HEAD_BYTES_MAX >> 10} KiB or last "
            f"{TAIL_BYTES_MAX >> 10} KiB"
        )
