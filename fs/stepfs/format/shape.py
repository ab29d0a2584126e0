"""A bound on the memory of an object before msgpack builds it: a linear walk over its headers that builds nothing.

One byte of msgpack can be an empty list of 56 bytes, five bytes can announce an array of 2³² values, and nested
announcements multiply. The walk keeps two sums. `pending`: values announced and not yet met, on all levels together;
each takes at least a byte, so there cannot be more of them than bytes left. `weight`: the memory of the containers;
beyond `WEIGHT_PER_BYTE` times the input plus an allowance the object is refused. Texts and binaries take as much as in
the input. Objects that stepfs writes weigh at most 12 per byte (many idle producers, one slice each).

Rejected: msgpack's own limits alone (they bound one container, not their sum); its hooks (they run after a container
was built, and its levels are allocated before).
"""

from __future__ import annotations

from typing import Final

from stepfs.errors import CorruptError

WEIGHT_PER_BYTE: Final = 16
WEIGHT_FREE: Final = 4 << 20  # a position (64 KiB) of the most wasteful shape fits
_VALUE: Final = 60  # a place in a list and the largest scalar that is not mostly its own bytes
_CONTAINER: Final = 16  # in addition to its own value in its parent
_PAIR: Final = 140  # a dict's entry at its worst load, a key, a value
_EXTENSION: Final = 120


def check_shape(body: bytes | memoryview, what: str) -> None:
    """`CorruptError` unless `body` may be one msgpack value that takes a small multiple of its size in memory.

    A value that is malformed in another way passes: msgpack refuses it.
    """
    end = len(body)
    weight_max = WEIGHT_FREE + WEIGHT_PER_BYTE * end
    weight = at = 0
    pending = 1
    lengths = _LENGTHS
    while pending:
        if at >= end:
            raise CorruptError(f"{what}: malformed msgpack (truncated)")
        head = body[at]
        at += 1
        pending -= 1
        length = lengths[head]
        if length >= 0:
            at += length
            continue
        counted, announces, size = _COUNTED[head]
        if counted:
            size = int.from_bytes(body[at : at + counted], "big")
            at += counted
        if announces:
            pending += announces * size
            weight += _CONTAINER + size * (_VALUE if announces == 1 else _PAIR)
            if pending > end - at or weight > weight_max:
                raise CorruptError(f"{what}: malformed msgpack (claims more than an object of {end} bytes may hold)")
        else:
            at += size
            if head in _EXTENSIONS:
                at += 1
                weight += _EXTENSION
    if weight > weight_max:
        raise CorruptError(f"{what}: malformed msgpack (too many extensions for {end} bytes)")


def _counted() -> dict[int, tuple[int, int, int]]:
    """First byte → (bytes of the count, values per count: 0 for bytes, the count if the first byte contains it)."""
    table = {0x80 + size: (0, 2, size) for size in range(16)}  # fixmap
    table |= {0x90 + size: (0, 1, size) for size in range(16)}  # fixarray
    table |= {0xD4 + power: (0, 0, 1 << power) for power in range(5)}  # fixext
    for power in range(3):
        width = 1 << power
        table |= {first + power: (width, 0, 0) for first in (0xC4, 0xC7, 0xD9)}  # bin, ext, str
    return table | {0xDC: (2, 1, 0), 0xDD: (4, 1, 0), 0xDE: (2, 2, 0), 0xDF: (4, 2, 0)}  # array, map


def _lengths() -> tuple[int, ...]:
    """Per first byte: the number of bytes that follow it, or -1 for those in `_COUNTED`."""
    table = [0] * 256  # fixint, nil, booleans, and the byte that is never used
    for size in range(32):
        table[0xA0 + size] = size  # fixstr
    for first, size in ((0xCA, 4), (0xCB, 8), (0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        table[first] = size
    for power in range(4):
        table[0xD0 + power] = 1 << power
    for first in _COUNTED:
        table[first] = -1
    return tuple(table)


_COUNTED: Final = _counted()
_LENGTHS: Final = _lengths()
_EXTENSIONS: Final = {0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)}
