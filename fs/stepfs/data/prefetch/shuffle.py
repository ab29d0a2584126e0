"""The order of `stepfs.ShuffledSteps`: a permutation that is a pure function of seed, epoch and count.

Trainer and mount compute it apart from each other, so it must not depend on a library's version: a Feistel network of
six rounds over the next power of four, walked until the value lies inside (cycle walking). Any place, and the place of
any value, costs some microseconds and no memory, however long the lake is. The constants are part of the control files'
version 1 (SEMANTICS.md): another order is another version.

Rejected: `random.shuffle` and `torch.randperm` (the whole list for each epoch, and not promised across versions).
"""

from __future__ import annotations

import hashlib
from typing import Final

_ROUNDS: Final = 6
_MASK: Final = (1 << 64) - 1


class Permutation:
    """A bijection of [0, count) to itself."""

    def __init__(self, count: int, *, seed: int, epoch: int) -> None:
        assert count > 0
        self.count = count
        self._half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        name = f"stepfs shuffle 1 {seed} {epoch} {count}".encode()
        digest = hashlib.blake2b(name, digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(_ROUNDS)]

    def value_at(self, place: int) -> int:
        assert 0 <= place < self.count
        value = self._forth(place)
        while value >= self.count:
            value = self._forth(value)
        return value

    def place_of(self, value: int) -> int:
        """Inverse of `value_at`."""
        assert 0 <= value < self.count
        place = self._back(value)
        while place >= self.count:
            place = self._back(place)
        return place

    def _forth(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return left << self._half_bits | right

    def _back(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in reversed(self._keys):
            left, right = right ^ (_mix(left ^ key) & self._half_mask), left
        return left << self._half_bits | right


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
