"""The planner's decision on one step: which tokens of which samples stand where, and where the next step begins."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.state import State

Integers = NDArray[np.int64]
SPAN_COLUMNS: Final = (
    "rank",
    "micro",
    "row",  # of its micro-batch
    "column",
    "tokens",
    "source",  # index into `sources`
    "epoch",
    "fragment",
    "block",
    "record",  # in block order
    "first",  # token of the record
)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step. Equal plans have equal digests."""

    step: int
    sequence_length: int
    shape: tuple[int, int, int]  # ranks, micro-batches, rows of a micro-batch
    sources: tuple[str, ...]  # in order of names
    shares: tuple[int, ...]  # out of 2**32, as they were accounted
    spans: Integers  # [spans, SPAN_COLUMNS, then the rows of each column], in reading order
    costs: Integers  # [ranks, micro-batches]
    cut: int  # spans that end before their document does, because a row or the step was full
    lost: Mapping[str, int]  # tokens that truncating or dropping lost, by source
    after: State
    loads: Mapping[str, Integers] = field(default_factory=dict)  # as `costs`, if several were balanced

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.spans[:, SPAN_COLUMNS.index("tokens")].sum())

    @property
    def room(self) -> int:
        """Tokens that the rows could hold."""
        ranks, micro, rows = self.shape
        return ranks * micro * rows * self.sequence_length

    def digest(self) -> str:
        """Of everything that a payload or the next step depends on: msgpack of it, then the spans as little-endian int64."""
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
