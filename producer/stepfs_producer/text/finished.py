"""The sizes of the files that a producer has read to their end, so that a later run can name those that grew.

A position is written with every commit, so only the last `FILES_MAX` files are remembered, 12 bytes each: 6 of a
digest of the name, 6 of the size. Growth of a file that was finished before those is not noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stepfs_producer.sources.listing import SourceFile

FILES_MAX: Final = 128
_DIGEST_BYTES: Final = 6
_SIZE_BYTES: Final = 6
_SIZE_MAX: Final = 2 ** (8 * _SIZE_BYTES) - 1
_ENTRY_BYTES: Final = _DIGEST_BYTES + _SIZE_BYTES


class FinishedFiles:
    """File name → bytes of the file when its end was reached, in the order of reading."""

    def __init__(self, packed: bytes = b"") -> None:
        self._sizes: dict[bytes, int] = {}
        self._packed: bytes | None = packed
        for at in range(0, len(packed) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
            entry = packed[at : at + _ENTRY_BYTES]
            self._sizes[entry[:_DIGEST_BYTES]] = int.from_bytes(entry[_DIGEST_BYTES:], "little")

    def add(self, name: str, size: int) -> None:
        """The end of `name` was reached after `size` bytes. A file that is read again keeps its place."""
        self._packed = None
        self._sizes[_digest(name)] = min(size, _SIZE_MAX)
        if len(self._sizes) > FILES_MAX:
            del self._sizes[next(iter(self._sizes))]

    def packed(self) -> bytes:
        """As stored in a position; the constructor takes it."""
        if self._packed is None:
            self._packed = b"".join(
                digest + size.to_bytes(_SIZE_BYTES, "little") for digest, size in self._sizes.items()
            )
        return self._packed

    def grown(self, files: Sequence[SourceFile]) -> list[str]:
        """Names of those of `files` that are longer now than when they were finished, in the order of `files`."""
        left = len(self._sizes)
        names: list[str] = []
        for file in reversed(files):  # the remembered ones are the last
            if not left:
                break
            size = self._sizes.get(_digest(file.name))
            if size is None:
                continue
            left -= 1
            if _size_of(file) > size:
                names.append(file.name)
        return names[::-1]


def _size_of(file: SourceFile) -> int:
    try:
        return Path(file.path).stat().st_size
    except OSError:  # gone, or out of reach: it did not grow
        return 0


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()
