"""What a planned producer keeps in its lake: its position in commits, the frozen listings of its sources, their records.

A listing is kept in shards under `sources/<digest>/`, without locations, since a corpus may move. The commit protocol never
looks into a position.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgpack

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.codec import Value, unpack

DIGEST_BYTES: Final = 16
SHARD_FILES_MAX: Final = 10_000
_VERSION: Final = 1

_POSITION_VERSION: Final = 1
_FIELDS: Final = 14
_LISTING, _EPOCH, _RECORDS, _SKIPPED, _TOKENS, _DROPPED, _PLAIN, _EXCLUDED = 1, 2, 8, 9, 11, 13, 14, 15
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


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
    laid_out: tuple[int, tuple[tuple[int, int], ...]] | None = None
    """Size and parts of the file that was listed here first, and that fragments follow. With a size of 0 the file is gone."""

    @property
    def is_gone(self) -> bool:
        return self.laid_out is not None and not self.size

    @property
    def layout(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        return self.laid_out or (self.size, self.parts)

    @property
    def frozen(self) -> tuple[Any, ...]:
        """The form that a listing stores."""
        found = (self.name, self.size, self.etag, self.head, [list(part) for part in self.parts])
        if self.laid_out is None:
            return found
        return (*found, [self.laid_out[0], [list(part) for part in self.laid_out[1]]])


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
            for name, size, etag, head, parts, *before in _unpacked(shard)["files"]:
                laid_out = (int(before[0][0]), _parts(before[0][1])) if before else None
                yield CorpusFile(name, int(size), etag, head, _parts(parts), laid_out=laid_out)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"a stored listing is malformed ({error}); restore it") from error


def _parts(stored: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(records), int(size)) for records, size in stored)


def _unpacked(shard: bytes) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(shard)
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptError(f"a stored listing is malformed ({error}); restore it") from error
    if not isinstance(value, dict) or value.get("v") != _VERSION:
        raise RefusedError("a stored listing has a format that this program does not know; upgrade stepfs")
    return value


def counts_shown(sources: Collection[Mapping[str, Any]]) -> list[str]:
    """The counts of sources that a table for people has; some only where a source has any."""
    seldom = [name for name in ("plain", "excluded") if any(one.get(name) for one in sources)]
    return ["records", "skipped", "dropped", *seldom, "epoch"]


@dataclass(frozen=True, slots=True)
class SourceStanding:
    """One source, over all steps of the plan. `listing`: digest of its files, which does not change; "" if it is none.
    `epoch`: the one being read, from 0.
    """

    listing: str
    tokens: int
    records: int
    skipped: int
    dropped: int
    plain: int  # documents that `fim` left as they are
    excluded: int  # records that the plan leaves out
    epoch: int


@dataclass(frozen=True, slots=True)
class PlanStanding:
    """A plan behind its newest committed step."""

    digest: str
    step: int
    sources: Mapping[str, SourceStanding]
    tokenizer: str = ""  # its identity
    since: int | None = None  # the plan's step from which on it holds as it is; None: from the first, or nobody knows

    def document(self) -> dict[str, Any]:
        """The form in JSON documents; sources in order of names. `share`: of the tokens of all sources."""
        total = sum(source.tokens for source in self.sources.values())
        return {
            "digest": self.digest,
            "step": self.step,
            "since": self.since,
            "tokens": total,
            "sources": {
                name: {
                    "tokens": source.tokens,
                    "share": round(source.tokens / total, 6) if total else 0.0,
                    "records": source.records,
                    "skipped": source.skipped,
                    "dropped": source.dropped,
                    "plain": source.plain,
                    "excluded": source.excluded,
                    "epoch": source.epoch,
                }
                for name, source in sorted(self.sources.items())
            },
        }


def read_plan_position(packed: bytes) -> PlanStanding | None:
    """The facts about a plan in a stored position; None if it is another program's, or of a version unknown here."""
    try:
        position = unpack(packed, "position") if packed else None
    except CorruptError:  # a position need not be msgpack
        return None
    if not isinstance(position, dict) or position.get("pipeline") != "plan":
        return None
    version, digest, sources = (position.get(name) for name in ("v", "plan", "sources"))
    step = _count(position.get("step"))
    if version != _POSITION_VERSION or isinstance(version, bool) or not isinstance(digest, str):
        return None
    if step is None or not isinstance(sources, dict):
        return None
    found = {}
    for name, fields in sources.items():
        standing = _source(fields)
        if not isinstance(name, str) or standing is None:
            return None
        found[name] = standing
    since = _count(position.get("since"))
    known = since if since is not None and since < step else None
    return PlanStanding(digest, step, found, str(position.get("tokenizer") or ""), known)


def _source(fields: Value) -> SourceStanding | None:
    if not isinstance(fields, list) or len(fields) < _FIELDS - 1:  # a later version appends
        return None
    tokens, records, skipped, epoch = (_count(fields[place]) for place in (_TOKENS, _RECORDS, _SKIPPED, _EPOCH))
    # Not counted when the plan began.
    later = [_count(fields[place]) if len(fields) > place else 0 for place in (_DROPPED, _PLAIN, _EXCLUDED)]
    dropped, plain, excluded = later
    if tokens is None or records is None or skipped is None or epoch is None:
        return None
    if dropped is None or plain is None or excluded is None:
        return None
    listing = fields[_LISTING]
    known = isinstance(listing, str) and _DIGEST.fullmatch(listing) is not None
    return SourceStanding(str(listing) if known else "", tokens, records, skipped, dropped, plain, excluded, epoch)


def _count(value: Value) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
