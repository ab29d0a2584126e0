"""Payloads that can be counted and checked after a crash, and cut into the messages that a broker takes. Pure.

A payload is its number, random bytes, and their CRC. A broker's message has a bound (1 MiB in NATS by default), so larger
payloads travel as several, each with the payload's number, its own place and how many there are.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from functools import cache

_NUMBER = struct.Struct(">Q")
_CRC = struct.Struct(">I")
_PIECE = struct.Struct(">QII")  # payload, piece, pieces
PIECE_HEAD_BYTES = _PIECE.size


@cache
def _noise(size: int) -> bytes:
    return random.Random(7).randbytes(size)


def payload(number: int, size: int) -> bytes:
    """`size` bytes (at least 12)."""
    body = _NUMBER.pack(number) + _noise(size - _NUMBER.size - _CRC.size)
    return body + _CRC.pack(zlib.crc32(body))


def number_of(body: bytes) -> int | None:
    """The payload's number; None if it is damaged."""
    if len(body) < _NUMBER.size + _CRC.size or zlib.crc32(body[: -_CRC.size]) != _CRC.unpack(body[-_CRC.size :])[0]:
        return None
    number: int = _NUMBER.unpack_from(body)[0]
    return number


def pieces(number: int, body: bytes, message_bytes: int) -> Iterator[bytes]:
    """Messages of at most `message_bytes`."""
    room = message_bytes - PIECE_HEAD_BYTES
    count = max(1, -(-len(body) // room))
    for index in range(count):
        yield _PIECE.pack(number, index, count) + body[index * room : (index + 1) * room]


class Assembly:
    """Puts payloads together again, whatever order their messages come in."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, bytes]] = {}

    def add(self, message: bytes) -> bytes | None:
        """The payload that this message completes."""
        number, index, count = _PIECE.unpack_from(message)
        found = self._open.setdefault(number, {})
        found[index] = message[PIECE_HEAD_BYTES:]
        if len(found) < count:
            return None
        del self._open[number]
        return b"".join(found[each] for each in range(count))
