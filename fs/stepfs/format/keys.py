"""Object names of a lake: pure functions from an object's identity to its key.

Components are fixed width in `[0-9a-z-]` so that no name is a prefix of a sibling: SeaweedFS sorts by path
component, S3 by bytes, and both must LIST in the same order. User-chosen ids appear only as hashes; the ids
themselves stand inside the objects.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stepfs._internal import entropy
from stepfs.format.ids import INTEGER_MAX, SEGMENT_STEPS, Epoch, SegmentIndex

LAKE: Final = "lake.msgpack"
_NUMBER_DIGITS: Final = 20
_DATA = re.compile(r"^[0-9a-f]{32}/data/([0-9a-f]{32})/(\d{10})-(\d{16})-([0-9a-f]{16})\.tgb$")


def new_lake_id() -> str:
    """128 random bits: a lake dropped and recreated under the same URL is another lake (hazard 7)."""
    return entropy.token(16).hex()


def component(identifier: str) -> str:
    """Fixed-width path component of a producer, group or node id."""
    return hashlib.sha256(identifier.encode()).hexdigest()[:32]


def numbered(prefix: str, number: int) -> str:
    """Slot `number` of the sequence under `prefix` (which ends in '/')."""
    assert prefix.endswith("/")
    assert 0 <= number < 10**_NUMBER_DIGITS
    return f"{prefix}{number:0{_NUMBER_DIGITS}d}"


def number_of(prefix: str, key: str) -> int | None:
    """Inverse of `numbered`; None for anything else found under the prefix, and for a number that no lake reaches."""
    tail = key.removeprefix(prefix)
    if len(tail) != _NUMBER_DIGITS or not tail.isascii() or not tail.isdigit() or key == tail:
        return None
    number = int(tail)
    return number if number <= INTEGER_MAX else None


def _prefix(room: str) -> Callable[[str], str]:
    return lambda lake_id: f"{lake_id}/{room}/"


log_prefix: Final = _prefix("log")
control_prefix: Final = _prefix("control")
snapshot_prefix: Final = _prefix("snapshot")
index_prefix: Final = _prefix("index")
data_prefix: Final = _prefix("data")
nodes_prefix: Final = _prefix("nodes")
sources_prefix: Final = _prefix("sources")
plans_prefix: Final = _prefix("plans")


def producer_prefix(lake_id: str, producer: str) -> str:
    """The prefix of a producer's objects; `producer` is its `component`."""
    return f"{lake_id}/data/{producer}/"


def node_key(lake_id: str, group: str, node: str) -> str:
    return f"{lake_id}/nodes/{component(group)}/{component(node)}"


def source_listing_key(lake_id: str, digest: str, shard: int) -> str:
    """Shard `shard` of the listing of a planned source, named by the digest of the whole listing."""
    return numbered(f"{sources_prefix(lake_id)}{_hexadecimal(digest)}/", shard)


def plan_key(lake_id: str, digest: str) -> str:
    return f"{plans_prefix(lake_id)}{_hexadecimal(digest)}"


def libraries_key(lake_id: str, digest: str, producer_id: str, epoch: Epoch) -> str:
    """Versions of the libraries with which one incarnation made steps, beside the plan it ran."""
    return f"{plans_prefix(lake_id)}{_hexadecimal(digest)}-libraries/{component(producer_id)}-{epoch:010d}"


def _hexadecimal(digest: str) -> str:
    assert re.fullmatch(r"[0-9a-f]{32,64}", digest)
    return digest


def extent(prefix: str, segment: SegmentIndex) -> str:
    """The object of a segment's steps under `prefix`: `<first>-<last>`, both inclusive."""
    first = segment * SEGMENT_STEPS
    last = first + SEGMENT_STEPS - 1
    return f"{prefix}{first:0{_NUMBER_DIGITS}d}-{last:0{_NUMBER_DIGITS}d}"


def segment_of(prefix: str, key: str) -> SegmentIndex | None:
    """Inverse of `extent`; None for anything else."""
    first, dash, _ = key.removeprefix(prefix).partition("-")
    if not (dash and first.isascii() and first.isdigit()):
        return None
    segment = SegmentIndex(int(first) // SEGMENT_STEPS)
    return segment if extent(prefix, segment) == key else None


@dataclass(frozen=True, slots=True)
class DataName:
    """The parts of a data object's name: enough to recognise an orphan without a clock."""

    producer: str  # `component` of the producer id
    epoch: Epoch
    seq: int
    nonce: int  # the random part, 64 bits


def data_key(lake_id: str, producer_id: str, epoch: Epoch, seq: int) -> str:
    """A fresh name for a TGB; the random part keeps a forked or rewound producer from overwriting (hazard 8)."""
    return f"{lake_id}/data/{component(producer_id)}/{data_name(epoch, seq)}-{entropy.token(8).hex()}.tgb"


def data_name(epoch: Epoch, seq: int) -> str:
    """The beginning of a data object's name below its producer's prefix; names sort by epoch, then seq."""
    assert 0 <= epoch < 10**10
    assert 0 <= seq < 10**16
    return f"{epoch:010d}-{seq:016d}"


def parse_data_key(key: str) -> DataName | None:
    """Read a data object's name; None for anything else found under `data/`."""
    match = _DATA.fullmatch(key)
    if match is None:
        return None
    return DataName(match[1], Epoch(int(match[2])), int(match[3]), int(match[4], 16))
