"""One log version: a delta of a few hundred bytes per TGB, never a rewrite of the whole manifest.

Rewriting a manifest per commit is quadratic in history, which is the growth BatchWeave (arXiv 2605.09994) fights
with pacing; here the commit itself is flat. The digest chain `d_v = SHA-256(d_{v-1} ‖ body_v)` lets a snapshot
be checked against the log and exposes a commit that was written on top of another history.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import Final

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.codec import Fields, Kind, decode, encode, readable
from stepfs.format.descriptor import Descriptor, descriptor_body, read_descriptor
from stepfs.format.ids import POSITION_BYTES_MAX, Epoch, Step, Version

COMMIT_ID_BYTES: Final = 16
DIGEST_BYTES: Final = 32
COMMIT_TGBS_MAX: Final = 4096
URL_BYTES_MAX: Final = 2048


class CommitKind(enum.StrEnum):
    """The kind of change of a version. A reader stops at an unknown kind."""

    DATA = "data"
    EPOCH = "epoch"  # an incarnation of a producer starts or retires
    SEAL = "seal"  # no more steps will come
    ORIGIN = "origin"  # a fork's parent, whose objects later descriptors may name


@dataclass(frozen=True, slots=True)
class Origin:
    """Another lake whose data objects this one shares (a fork's parent), and the shared steps.

    The fork's steps below `end` are the parent's: equal numbers up to `skip_first`, then those from `skip_end` on.
    """

    url: str
    lake_id: str
    skip_first: Step
    skip_end: Step
    end: Step

    def parent_step(self, step: Step) -> Step:
        """The parent's number of a step below `end`."""
        return step if step < self.skip_first else Step(step + self.skip_end - self.skip_first)


@dataclass(frozen=True, slots=True)
class Commit:
    """The decoded body of `log/<version>`."""

    version: Version
    lake_id: str
    kind: CommitKind
    commit_id: bytes  # random: distinguishes my create from another writer's
    prev_digest: bytes
    producer_id: str
    epoch: Epoch
    incarnation: bytes  # random per start: distinguishes two processes at one epoch
    next_seq: int  # of the producer, after this commit
    position: bytes  # msgpack of the producer's position; opaque, never compared
    first_step: Step
    tgbs: tuple[Descriptor, ...]
    time_ms: int
    total_bytes: int  # payload bytes of all steps up to and including this version
    total_records: int
    control: int = 0  # a control record that exists, as its writer knew: where a cold start begins to look
    retired: bool = False  # EPOCH only: this incarnation retires
    origin: Origin | None = None  # ORIGIN only

    @property
    def next_step(self) -> Step:
        return Step(self.first_step + len(self.tgbs))


def genesis_digest(lake_id: str) -> bytes:
    """d_{-1}: the digest before the first commit of a lake."""
    return hashlib.sha256(b"stepfs-genesis\n" + lake_id.encode()).digest()


def chain_digest(prev_digest: bytes, body: bytes) -> bytes:
    """d_v from d_{v-1} and the stored bytes of version v."""
    assert len(prev_digest) == DIGEST_BYTES
    return hashlib.sha256(prev_digest + body).digest()


def encode_commit(commit: Commit) -> bytes:
    """Commit → the bytes of its log object. `RefusedError` if readers would not accept them."""
    assert len(commit.commit_id) == len(commit.incarnation) == COMMIT_ID_BYTES
    assert len(commit.prev_digest) == DIGEST_BYTES
    assert len(commit.position) <= POSITION_BYTES_MAX
    assert len(commit.tgbs) <= COMMIT_TGBS_MAX
    body: dict[str, object] = {
        "version": commit.version,
        "lake": commit.lake_id,
        "kind": str(commit.kind),
        "id": commit.commit_id,
        "prev": commit.prev_digest,
        "producer": commit.producer_id,
        "epoch": commit.epoch,
        "incarnation": commit.incarnation,
        "next_seq": commit.next_seq,
        "position": commit.position,
        "first_step": commit.first_step,
        "tgbs": [descriptor_body(tgb) for tgb in commit.tgbs],
        "time": commit.time_ms,
        "bytes": commit.total_bytes,
        "records": commit.total_records,
        "control": commit.control,
        "retired": commit.retired,
    }
    if commit.origin is not None:
        body["origin"] = origin_body(commit.origin)
    return readable(Kind.COMMIT, encode(Kind.COMMIT, body), commit, decode_commit)


def decode_commit(data: bytes, what: str) -> Commit:
    """The bytes of a log object → Commit. `NewerFormatError` for a kind this reader does not know."""
    fields = decode(Kind.COMMIT, data, what)
    name = fields.text("kind")
    if name not in set(CommitKind):
        raise NewerFormatError(f"{what}: commit of unknown kind {name!r}; upgrade stepfs")
    kind = CommitKind(name)
    tgbs = tuple(
        read_descriptor(item, f"{what}: tgb {number}")
        for number, item in enumerate(fields.maps("tgbs", items_max=COMMIT_TGBS_MAX))
    )
    if bool(tgbs) != (kind is CommitKind.DATA):
        raise CorruptError(f"{what}: a {kind} commit with {len(tgbs)} TGBs")
    return Commit(
        version=Version(fields.integer("version")),
        lake_id=fields.text("lake"),
        kind=kind,
        commit_id=fields.binary("id", size=COMMIT_ID_BYTES),
        prev_digest=fields.binary("prev", size=DIGEST_BYTES),
        producer_id=fields.text("producer"),
        epoch=Epoch(fields.integer("epoch")),
        incarnation=fields.binary("incarnation", size=COMMIT_ID_BYTES),
        next_seq=fields.integer("next_seq"),
        position=fields.binary("position", size_max=POSITION_BYTES_MAX),
        first_step=Step(fields.integer("first_step")),
        tgbs=tgbs,
        time_ms=fields.integer("time"),
        total_bytes=fields.total("bytes"),
        total_records=fields.total("records"),
        control=fields.integer("control"),
        retired=fields.boolean("retired"),
        origin=read_origin(fields.map("origin")) if kind is CommitKind.ORIGIN else None,
    )


def origin_body(origin: Origin) -> dict[str, object]:
    """Origin → the map stored in origin commits and snapshots."""
    return {
        "url": origin.url,
        "lake": origin.lake_id,
        "skip_first": origin.skip_first,
        "skip_end": origin.skip_end,
        "end": origin.end,
    }


def read_origin(fields: Fields) -> Origin:
    """Inverse of `origin_body`."""
    skip_first = Step(fields.integer("skip_first"))
    return Origin(
        url=fields.text("url", bytes_max=URL_BYTES_MAX),
        lake_id=fields.text("lake"),
        skip_first=skip_first,
        skip_end=Step(fields.integer("skip_end", low=skip_first)),
        end=Step(fields.integer("end")),
    )
