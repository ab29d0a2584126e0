"""The files of a planned source, as they were listed at the first start: frozen, so that every start reads the same ones.

A lake keeps a listing in shards of bytes under `sources/<digest>/`. It has no locations: a corpus may move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgpack

from stepfs.errors import CorruptError, RefusedError

DIGEST_BYTES: Final = 16
SHARD_FILES_MAX: Final = 10_000
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """One file. All but `location` is frozen."""

    name: str  # entry number / path below the entry's literal prefix
    size: int  # bytes
    etag: str  # of an object; "" of a local file
    head: str  # digest of the first 64 KiB of a local file; "" of an object
    parts: tuple[
        tuple[int, int], ...
    ]  # (records, bytes) of each part that the format reads at once; () if it reads byte ranges
    location: str = ""  # absolute path, or s3://bucket/key

    @property
    def frozen(self) -> tuple[Any, ...]:
        """As a listing stores it."""
        return (self.name, self.size, self.etag, self.head, [list(part) for part in self.parts])


@dataclass(frozen=True)
class Listing:
    """The files of a source, sorted by name."""

    files: tuple[CorpusFile, ...]

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits; equal where names, sizes, beginnings and parts are."""
        state = hashlib.blake2b(b"stepfs-listing-1\0", digest_size=DIGEST_BYTES)
        for file in self.files:
            state.update(msgpack.packb(file.frozen))
        return state.hexdigest()

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def to_shards(self) -> list[bytes]:
        """The bytes to store; equal listings have equal shards."""
        groups = [
            self.files[first : first + SHARD_FILES_MAX] for first in range(0, max(1, len(self.files)), SHARD_FILES_MAX)
        ]
        return [
            msgpack.packb({"v": _VERSION, "shards": len(groups), "files": [file.frozen for file in group]})
            for group in groups
        ]


def shard_count(first: bytes) -> int:
    """How many shards the listing has whose first shard this is."""
    return int(_unpacked(first)["shards"])


def from_shards(shards: Sequence[bytes], digest: str) -> Listing:
    """The stored listing, without locations. `CorruptError` unless it has that digest."""
    listing = Listing(tuple(_thawed(shards)))
    if listing.digest != digest:
        raise CorruptError(f"the stored listing {digest} has other bytes; restore it, or give its source a new name")
    return listing


def _thawed(shards: Sequence[bytes]) -> Iterator[CorpusFile]:
    try:
        for shard in shards:
            for name, size, etag, head, parts in _unpacked(shard)["files"]:
                yield CorpusFile(name, int(size), etag, head, tuple((int(n), int(b)) for n, b in parts))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"a stored listing is malformed ({error}); restore it") from error


def _unpacked(shard: bytes) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(shard)
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptError(f"a stored listing is malformed ({error}); restore it") from error
    if not isinstance(value, dict) or value.get("v") != _VERSION:
        raise RefusedError("a stored listing has a format that this program does not know; upgrade stepfs")
    return value
