"""Configuration of the planner: sources, mix, shape of a step, and how it is packed and balanced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from stepfs_producer.plan.balance import Method, Over
from stepfs_producer.plan.cost import CostModel
from stepfs_producer.plan.mix import MixSchedule, Stages
from stepfs_producer.plan.sources import Long, SkipBudget

_DEBT_TOKENS_MAX: Final = 1 << 30  # a debt is a number of tokens times 2**32, and fits an int64


class Packing(StrEnum):
    """How documents become rows."""

    BEST_FIT = "best_fit"
    CONCAT = "concat"


class Exhausted(StrEnum):
    """Whether the plan ends with its first or its last exhausted source."""

    FIRST = "first"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class SourceRule:
    """A source for the planner, besides its samples."""

    identity: str
    listing: str = ""
    long: Long = Long.SPLIT
    skips: SkipBudget | None = None  # None: the first bad record stops the plan
    pairs: bool = False  # two documents of a record are one sample
    accepted: str = (
        ""  # the identity of other samples of the same records, if steps of them may go on with those of this one
    )
    cursor: tuple[int, ...] | None = None  # where to go on, of files that changed and were accepted so


@dataclass(frozen=True, slots=True)
class Rules:
    """A plan, normalised."""

    digest: str
    sources: Mapping[str, SourceRule]
    mix: MixSchedule  # in order of the sources' names
    stages: Stages
    ranks: int
    micro_batches: int = 1
    micro_batch_tokens: int = 4096
    packing: Packing = Packing.BEST_FIT
    align: int = 1  # a document takes a multiple of so many tokens of its row
    cost: CostModel = field(default_factory=CostModel)
    columns: tuple[str, ...] = ()  # that samples may have, in order of names
    loads: tuple[str, ...] = ()  # several to be balanced in place of the cost: `TOKENS`, or columns
    method: Method = Method.AUTO
    over: Over = Over.MICRO_BATCHES
    exhausted: Exhausted = Exhausted.ALL
    steps_max: int | None = None
    tokens_max: int | None = None  # the plan ends after the step that reaches it
    pad_last: bool = False  # write a last step although a micro-batch has no token
    tokenizer: str = ""  # its identity
    held_out: bool = False  # take the records that the plan holds out

    def __post_init__(self) -> None:
        # `plan.model` refuses such plans by name. Here they would be wrong steps.
        assert min(self.ranks, self.micro_batches) >= 1
        assert self.step_tokens <= _DEBT_TOKENS_MAX
        for length in self.stages.every():
            assert self.micro_batch_tokens % length == 0
            assert length % self.align == 0
            assert length * len(self.sources) <= _DEBT_TOKENS_MAX

    @property
    def step_tokens(self) -> int:
        """Tokens that a step has room for."""
        return self.ranks * self.micro_batches * self.micro_batch_tokens
