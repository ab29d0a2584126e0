"""Which primed files lose their pages next: those that were read, oldest first, then those that are open and idle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from stepfs.format.ids import SliceKey

FILES_MAX: Final = 64
_BYTES_MIN: Final = 1 << 20  # of small files, so much goes by one call into a thread


class PageOrder:
    """The primed files that may lose their pages."""

    def __init__(self) -> None:
        self._consumed: dict[SliceKey, None] = {}  # opened and closed
        # Opened and closed, and another reader is expected: bytes; not dropped.
        self.awaited: dict[SliceKey, int] = {}
        self.awaited_bytes = 0
        self._idle: dict[SliceKey, None] = {}  # open, apparently without a reader

    def __bool__(self) -> bool:
        return bool(self._consumed or self._idle)

    def __iter__(self) -> Iterator[SliceKey]:
        return itertools.chain(self._consumed, self._idle)

    def closed(self) -> list[SliceKey]:
        return [*self.awaited, *self._consumed]

    def consume(self, key: SliceKey) -> None:
        self.discard(key)
        self._consumed[key] = None

    def keep_for_peer(self, key: SliceKey, length: int) -> None:
        """The file was closed, and another reader is expected."""
        self.discard(key)
        self.awaited[key] = length
        self.awaited_bytes += length

    def make_idle(self, key: SliceKey) -> None:
        """Note a file that is open, apparently without a reader."""
        if key not in self._consumed:
            self._idle[key] = None

    def discard(self, key: SliceKey) -> None:
        self._consumed.pop(key, None)
        self._idle.pop(key, None)
        self.awaited_bytes -= self.awaited.pop(key, 0)


def first_of(keys: Iterable[SliceKey], size: int, length: Callable[[SliceKey], int]) -> list[SliceKey]:
    """The first files of at least `size` bytes together, if there are so many; of small files several."""
    found: list[SliceKey] = []
    found_bytes = 0
    for key in itertools.islice(keys, FILES_MAX):
        found.append(key)
        found_bytes += length(key)
        if found_bytes >= max(size, _BYTES_MIN):
            break
    return found
