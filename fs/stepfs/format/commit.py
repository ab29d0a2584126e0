"""One log version: a delta of a few hundred bytes per TGB, never a rewrite of the whole manifest.

Rewriting a manifest per commit is quadratic in history, which is the growth BatchWeave (arXiv 2605.09994) fights
with pacing; here the commit itself is flat. The digest chain `d_v = SHA-256(d_{v-1} ‖ body_v)` lets a snapshot
be checked against the log and exposes a commit that was written on top of another history.
"""

import enum
import hashlib
from dataclasses import dataclass, field, replace
from typing import Final

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.codec import Fields, Kind, Later, Layout, Stored, decode, encode, readable, stored
from stepfs.format.ids import POSITION_BYTES_MAX, Epoch, Step, Version
from stepfs.format.tgb import Descriptor, descriptor_body, read_descriptor

COMMIT_ID_BYTES: Final = 16
DIGEST_BYTES: Final = 32
COMMIT_TGBS_MAX: Final = 4096
CARRIED_MAX: Final = 64
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
    later: Later = field(default=(), hash=False)

    @property
    def cut(self) -> Step:
        """The steps below are the parent's, with the same numbers: the first that the fork left out, or made itself."""
        return min(self.skip_first, self.end) if self.skip_first < self.skip_end else self.end

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
    writer: str = ""  # EPOCH only: the program of this incarnation
    carried: tuple[bytes, ...] = ()  # see `stepfs.lake.log.carriers`: a hint

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


def _read_kind(fields: Fields, name: str) -> CommitKind:
    kind = fields.text(name)
    if kind not in set(CommitKind):
        raise NewerFormatError(f"{fields.what}: commit of unknown kind {kind!r}; upgrade stepfs")
    return CommitKind(kind)


def _read_tgbs(fields: Fields, name: str) -> tuple[Descriptor, ...]:
    return tuple(map(read_descriptor, fields.maps(name, items_max=COMMIT_TGBS_MAX)))


ORIGIN: Final = Layout(
    Origin,
    url=stored("url", Fields.text, bytes_max=URL_BYTES_MAX),
    lake_id=stored("lake", Fields.text),
    skip_first=stored("skip_first", Fields.integer),
    skip_end=Stored("skip_end", lambda fields, name: fields.integer(name, low=fields.integer("skip_first"))),
    end=stored("end", Fields.integer),
)
_COMMIT: Final = Layout(
    Commit,
    version=stored("version", Fields.integer),
    lake_id=stored("lake", Fields.text),
    kind=Stored("kind", _read_kind, str),
    commit_id=stored("id", Fields.binary, size=COMMIT_ID_BYTES),
    prev_digest=stored("prev", Fields.binary, size=DIGEST_BYTES),
    producer_id=stored("producer", Fields.text),
    epoch=stored("epoch", Fields.integer),
    incarnation=stored("incarnation", Fields.binary, size=COMMIT_ID_BYTES),
    next_seq=stored("next_seq", Fields.integer),
    position=stored("position", Fields.binary, size_max=POSITION_BYTES_MAX),
    first_step=stored("first_step", Fields.integer),
    tgbs=Stored("tgbs", _read_tgbs, lambda tgbs: list(map(descriptor_body, tgbs))),
    time_ms=stored("time", Fields.integer),
    total_bytes=stored("bytes", Fields.total),
    total_records=stored("records", Fields.total),
    control=stored("control", Fields.integer),
    retired=stored("retired", Fields.boolean),
)


def encode_commit(commit: Commit) -> bytes:
    """Commit → the bytes of its log object. `RefusedError` if readers would not accept them."""
    body = _COMMIT.body(commit)
    if commit.origin is not None:
        body["origin"] = ORIGIN.body(commit.origin)
    if commit.carried:
        body["carried"] = list(commit.carried)
    if commit.writer:
        body["writer"] = commit.writer
    return readable(Kind.COMMIT, encode(Kind.COMMIT, body), commit, decode_commit)


def decode_commit(data: bytes, what: str) -> Commit:
    """The bytes of a log object → Commit. `NewerFormatError` for a kind this reader does not know."""
    fields = decode(Kind.COMMIT, data, what)
    commit = _COMMIT.read(fields)
    if bool(commit.tgbs) != (commit.kind is CommitKind.DATA):
        raise CorruptError(f"{what}: a {commit.kind} commit with {len(commit.tgbs)} TGBs")
    if commit.kind is CommitKind.ORIGIN:
        commit = replace(commit, origin=ORIGIN.read(fields.map("origin")))
    if "writer" in fields:
        commit = replace(commit, writer=fields.text("writer"))
    if "carried" in fields:
        commit = replace(commit, carried=fields.hints("carried", items_max=CARRIED_MAX))
    return commit
