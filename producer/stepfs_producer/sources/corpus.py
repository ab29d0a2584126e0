"""The listing of a source: its files, and their parts, so that fragments are enumerated without opening a file.

A listing is frozen at the first start, as shards of bytes under `<lake_id>/sources/<digest>/`. It has no
locations; `located` finds its files among those of today, and refuses by name a file that is gone or changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import msgpack

from stepfs.errors import AbsentError, CorruptError, RefusedError
from stepfs_producer.sources.files.found import FoundFile, find_files
from stepfs_producer.sources.files.opened import head_of, open_file
from stepfs_producer.sources.formats import format_of
from stepfs_producer.sources.spec import SourceSpec
from stepfs_producer.sources.task import Unit

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


@dataclass(frozen=True)
class Listing:
    """The files of a source, sorted by name."""

    files: tuple[CorpusFile, ...]

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits; equal where names, sizes, beginnings and parts are."""
        state = hashlib.blake2b(b"stepfs-listing-1\0", digest_size=DIGEST_BYTES)
        for file in self.files:
            state.update(msgpack.packb(_frozen(file)))
        return state.hexdigest()

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def to_shards(self) -> list[bytes]:
        """The bytes to store; equal listings have equal shards."""
        groups = [
            self.files[first : first + SHARD_FILES_MAX]
            for first in range(0, max(1, len(self.files)), SHARD_FILES_MAX)
        ]
        return [
            msgpack.packb({"v": _VERSION, "shards": len(groups), "files": [_frozen(file) for file in group]})
            for group in groups
        ]

    def located(self, now: Listing, source: str) -> Listing:
        """This listing with the locations of `now`. `RefusedError` names the first file that is gone or changed.

        Files that `now` has in addition are not part of it; they come with the next epoch.
        """
        present = {file.name: file for file in now.files}
        return Listing(tuple(_located(file, present.get(file.name), source) for file in self.files))


def shard_count(first: bytes) -> int:
    """How many shards the listing has whose first shard this is."""
    return int(_unpacked(first)["shards"])


def from_shards(shards: Sequence[bytes], digest: str) -> Listing:
    """The stored listing, without locations. `CorruptError` unless it has that digest."""
    listing = Listing(tuple(_thawed(shards)))
    if listing.digest != digest:
        raise CorruptError(
            f"the stored listing {digest} has other bytes; restore it, or give its source a new name"
        )
    return listing


def list_corpus(spec: SourceSpec) -> Listing:
    """List the files of a source as they are now. Footers, indices and the beginnings of local files are read.

    `UsageError`, `AbsentError` and `RefusedError` say which entry or file is wrong; `AbsentError` if there is no record.
    """
    rule = format_of(spec)
    found = find_files(
        rule.entries(spec.files), rule.suffixes, endpoint_url=spec.endpoint_url, profile=spec.profile
    )
    files = tuple(_inspected(spec, file) for file in rule.choose(found))
    if not any(_has_records(rule.unit(file.name), file) for file in files):
        what = "all its files are empty" if files else f"it has no file of the format {spec.format}"
        raise AbsentError(f"source {spec.name}: {what}; name files with records, or leave the source out")
    return Listing(files)


def _has_records(unit: Unit, file: CorpusFile) -> bool:
    if unit is Unit.PARTS:
        return any(records for records, _ in file.parts)
    return unit is not Unit.NONE and file.size > 0


def _inspected(spec: SourceSpec, found: FoundFile) -> CorpusFile:
    file = open_file(spec, found.location, found.size, etag=found.etag)
    try:
        head = "" if found.etag else head_of(file)
        parts = tuple(format_of(spec).parts(spec, file))
    finally:
        file.close()
    return CorpusFile(found.name, found.size, found.etag, head, parts, found.location)


def _frozen(file: CorpusFile) -> tuple[Any, ...]:
    return (file.name, file.size, file.etag, file.head, [list(part) for part in file.parts])


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


def _located(file: CorpusFile, now: CorpusFile | None, source: str) -> CorpusFile:
    advice = "restore it, or give the source a new name to begin it anew"
    if now is None:
        raise RefusedError(f"source {source}: the file {file.name} is gone; {advice}")
    if _frozen(now) == _frozen(file):
        return replace(file, location=now.location)
    if now.size != file.size:
        changed = f"is {'shorter' if now.size < file.size else 'longer'} than when this plan began"
    elif now.etag != file.etag:
        changed = "was replaced since this plan began (its etag differs)"
    else:
        changed = "begins otherwise than when this plan began"
    raise RefusedError(f"source {source}: {now.location} {changed}; {advice}")
