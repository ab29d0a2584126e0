"""The planner's decision on one step, and the position behind it.

A source that left the plan keeps its entry, and continues from it when it comes back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Final

import msgpack

from stepfs.errors import RefusedError
from stepfs_producer.plan.arrays import Integers
from stepfs_producer.plan.spans import Span

VERSION: Final = 1
_INTEGER_BYTES_MAX: Final = 9
_CRC_BYTES_MAX: Final = 5
_TEXTS: Final = 2
_INTEGERS: Final = 14
_LATER: Final = 3  # of them, which positions of earlier versions lack


@dataclass(frozen=True, slots=True)
class SourceState:
    """One source. The cursor is (epoch, fragment, block, taken, into); fields are in the position's order."""

    identity: str  # of rule, seed, transform and tokenizer: a cursor means something only while it stays
    listing: str  # digest of the files of this epoch
    epoch: int = 0
    fragment: int = 0  # place in the order of the epoch
    block: int = 0  # in its fragment
    taken: int = 0  # records of the block, in block order, skipped ones included
    into: int = 0  # tokens of the next record that are taken already
    debt: int = 0  # tokens * 2**32 that the source should have given
    records: int = 0
    skipped: int = 0
    run: int = 0  # records skipped directly before the cursor
    tokens: int = 0
    begun: int = 0  # CRC-32C of the block of which records are taken; 0: of none
    dropped: int = 0  # records that are longer than a row, and no document
    plain: int = 0  # records that `fim` left as they are, because they are longer than a row; stored if there are any
    excluded: int = 0  # records that the plan leaves out; stored if there are any

    @property
    def cursor(self) -> tuple[int, ...]:
        return (self.epoch, self.fragment, self.block, self.taken, self.into)

    @property
    def stored(self) -> list[str | int]:
        fields = list(astuple(self))
        return fields if self.excluded else fields[:-1] if self.plain else fields[:-2]


@dataclass(frozen=True, slots=True)
class State:
    """A plan before `step`."""

    plan: str  # digest of the plan that made it
    step: int
    sources: Mapping[str, SourceState]
    revision: int = 1  # of the planner
    tokenizer: str = ""  # its identity
    held_out: bool = False  # the records are those that the plan holds out
    since: int | None = None  # the step from which on a changed plan holds; None: none has changed, or nobody knows

    @property
    def tokens(self) -> int:
        """Tokens of all steps so far, those of former sources included."""
        return sum(source.tokens for source in self.sources.values())

    def position(self) -> dict[str, object]:
        """A msgpack map, for `Producer.append`."""
        return {
            "pipeline": "plan",
            "v": VERSION,
            "revision": self.revision,
            "plan": self.plan,
            "step": self.step,
            "tokenizer": self.tokenizer,
            "held_out": self.held_out,
            "sources": {name: self.sources[name].stored for name in sorted(self.sources)},
            **({} if self.since is None else {"since": self.since}),
        }


def read_position(value: object) -> State:
    """The state in a stored position. `RefusedError` if it belongs to something else."""
    if not isinstance(value, Mapping) or value.get("pipeline") != "plan":
        raise RefusedError("this producer id was used by another pipeline; go on with that one, or name another lake")
    fields: Mapping[str, Any] = value
    if fields.get("v") != VERSION:
        raise RefusedError(
            f"the position of this plan is of version {fields.get('v')}, this program reads {VERSION}; upgrade stepfs"
        )
    try:
        sources = {str(name): _source_state(*one) for name, one in fields["sources"].items()}
        made_of = str(fields["tokenizer"]), bool(fields["held_out"])
        since = None if fields.get("since") is None else int(fields["since"])
        return State(str(fields["plan"]), int(fields["step"]), sources, int(fields["revision"]), *made_of, since)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(f"the position of this plan is malformed ({error}); name another lake") from error


def _source_state(identity: object, listing: object, *numbers: Any) -> SourceState:
    if not _INTEGERS - _LATER <= len(numbers) <= _INTEGERS:
        raise ValueError(f"{len(numbers)} numbers of a source")
    return SourceState(str(identity), str(listing), *map(int, numbers))


def position_bytes_max(state: State, growing: Collection[str] | None = None, counting: Collection[str] = ()) -> int:
    """Bytes that the position can reach, however long the plan runs. Only `growing` sources change, all by default; `counting`:
    sources of which records may be excluded, or left as they are by `fim`.
    """
    texts = [text for name, source in state.sources.items() for text in (name, source.identity, source.listing)]
    frame: bytes = msgpack.packb({**state.position(), "sources": {}})
    integers = _INTEGER_BYTES_MAX  # of the step
    for name, source in state.sources.items():
        if growing is None or name in growing:
            number_count = _INTEGERS if name in counting else len(source.stored) - _TEXTS
            integers += (number_count - 1) * _INTEGER_BYTES_MAX + _CRC_BYTES_MAX
        else:
            integers += sum(len(msgpack.packb(number)) for number in source.stored[_TEXTS:])
    return len(frame) + sum(len(msgpack.packb(text)) for text in texts) + integers + 3 * len(state.sources) + 5


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step. Equal plans have equal digests."""

    step: int
    sequence_length: int
    shape: tuple[int, int, int]  # ranks, micro-batches, rows of a micro-batch
    sources: tuple[str, ...]  # in order of names
    shares: tuple[int, ...]  # out of 2**32, as they were accounted
    spans: Integers  # [spans, columns of `Span`, then the rows of each column], in reading order
    costs: Integers  # [ranks, micro-batches]
    cut: int  # spans that end before their document does, because a row or the step was full
    lost: Mapping[str, int]  # tokens that truncating or dropping lost, by source
    after: State
    loads: Mapping[str, Integers] = field(default_factory=dict)  # as `costs`, if several were balanced

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.spans[:, Span.TOKENS].sum())

    @property
    def room(self) -> int:
        """Tokens that the rows could hold."""
        ranks, micro, rows = self.shape
        return ranks * micro * rows * self.sequence_length

    def digest(self) -> str:
        """Digest of all that a payload or the next step depends on: msgpack of it, then the spans as little-endian int64."""
        head = [self.step, self.sequence_length, list(self.shape), list(self.sources), self.after.position()]
        data: bytes = msgpack.packb(head) + self.spans.astype("<i8").tobytes()
        return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Need:
    """The step cannot be decided yet: source → samples from its cursor on that it is likely to take."""

    samples: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class End:
    """The plan is complete before this step."""

    reason: str
    behind: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # records behind the last samples: dropped, excluded
