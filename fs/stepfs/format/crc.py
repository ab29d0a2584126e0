"""The CRC32C of bytes that stand one behind the other, from their own: no second pass over them.

Mark Adler's way (zlib's `crc32_combine`, with x^n instead of matrices): a CRC is a polynomial over GF(2), and n zero bytes
behind it multiply it by x^8n. A product takes as long in Python as the CRC of 128 KiB that are in a cache.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_POLYNOMIAL: Final = 0x82F63B78  # reflected: the highest bit is x^0
_ONE: Final = 1 << 31
_X8: Final = 1 << 23


def joined(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of A + B from those of A and of B."""
    return _product(_zeros(second_bytes), first) ^ second


@lru_cache(maxsize=64)
def _zeros(count: int) -> int:
    """x^(8 · count)."""
    power, square = _ONE, _X8
    while count:
        if count & 1:
            power = _product(square, power)
        square = _product(square, square)
        count >>= 1
    return power


def _product(left: int, right: int) -> int:
    found, bit = 0, _ONE
    while bit:
        if left & bit:
            found ^= right
        bit >>= 1
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return found
