"""The smaller parts of a plan: shape of a step, tokenizer, packing, cost, balance, end."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from stepfs.format.mesh import Mesh, parse_mesh
from stepfs_producer.plan import cost
from stepfs_producer.plan.balance import Method, Over
from stepfs_producer.plan.file.columns import NAMES, Column, problems_of_columns
from stepfs_producer.plan.file.part import Part
from stepfs_producer.plan.file.problems import Problem
from stepfs_producer.plan.file.scalars import (
    Parsed,
    choice,
    decimal,
    share,
    size,
    text,
    tokenizer_kind,
    user_code,
    whole,
)
from stepfs_producer.plan.rules import Exhausted, Packing
from stepfs_producer.plan.samples import SkipBudget

EXTENSIONS: Final = (".safetensors", ".npy", ".pt", ".tar", ".bin")
BLOCK_BYTES: Final = 8 << 20
HIDDEN_SIZE: Final = 4096  # of a model of 7 billion parameters
STEPS_MAX: Final = 1 << 40
LENGTH_MAX: Final = 1 << 24
MICRO_BATCHES_MAX: Final = 1 << 16
_COEFFICIENT_MAX: Final = 1 << 53
_TOKENS_MAX: Final = 1 << 62
_BYTES: Final = "bytes"

Step = Annotated[int, whole(0, STEPS_MAX)]
Length = Annotated[int, whole(1, LENGTH_MAX)]
Coefficient = Annotated[int, whole(0, _COEFFICIENT_MAX)]


class Output(Part):
    """The files of a step."""

    example: ClassVar[str] = '{ext: .safetensors, mesh: "dp=8", sequence_length: 4096}'
    refused: ClassVar[Mapping[str, str]] = {"parts": "parts: several parts are not supported yet; remove the key"}

    ext: Annotated[Literal[".safetensors", ".npy", ".pt", ".tar", ".bin"], choice("extension", EXTENSIONS)] = (
        ".safetensors"
    )
    """Kind of file."""
    mesh: Annotated[Mesh, Parsed(parse_mesh, {"type": "string"})]
    """The trainer's mesh, slowest dimension first, such as pp=2,dp=4,tp=2. Each coordinate of dp has files."""
    sequence_length: Length | None = None
    """Tokens of a row, unless `stages` say so."""
    micro_batches: Annotated[int, whole(1, MICRO_BATCHES_MAX)] = 1
    """Per data-parallel rank and step."""
    files: Annotated[Literal["ranks", "micro_batches"], choice("kind of files", ("ranks", "micro_batches"))] = "ranks"
    """ranks: one per rank, of all its micro-batches; micro_batches: one of each, so that other meshes can read the lake."""
    micro_batch_tokens: Length | None = None
    """A multiple of every stage's sequence length; by default the longest."""
    labels: Annotated[Literal["shifted", "same"], choice("kind of labels", ("shifted", "same"))] = "shifted"
    """shifted: y[i] = x[i+1]; same: y = x, for models that shift by themselves."""
    columns: dict[str, Column] = Field(default_factory=dict)
    """By name: arrays that transforms give beside the tokens."""

    def own_problems(self) -> list[Problem]:
        return list(problems_of_columns(self.columns, self.ext))


class Stage(Part):
    """A sequence length from a step on."""

    example: ClassVar[str] = "{from: 0, sequence_length: 4096}"

    from_: Step = Field(default=0, validation_alias="from", serialization_alias="from")
    """First step."""
    sequence_length: Length
    """Tokens of a row."""
    lengths: dict[str, Length] = Field(default_factory=dict)
    """By source: the most tokens of it that make one document, in place of the source's `sequence_length`."""


class Tokenizer(Part):
    """How text becomes token ids."""

    short: ClassVar[str | None] = "kind"
    example: ClassVar[str] = "{kind: huggingface, file: tokenizer.json}"

    kind: Annotated[Literal["bytes", "huggingface"], tokenizer_kind()] = "bytes"
    """huggingface: a model's own tokenizer.json; bytes: none."""
    file: Annotated[str, text("file name")] | None = None
    """Of huggingface."""
    eos: Annotated[str, text("token")] | None = None
    """Token behind each document, by name; `none` for no token."""
    bos: Annotated[str, text("token")] | None = None
    """Token before each document, by name; `none` for no token."""
    pad: Annotated[str, text("token")] | None = None
    """Token that fills the last row, by name."""

    def own_problems(self) -> list[Problem]:
        if self.kind == _BYTES and self.file is not None:
            return [Problem(("file",), "kind: bytes has no file; remove the file, or choose another kind")]
        if self.kind != _BYTES and self.file is None:
            return [Problem((), f"kind: {self.kind} needs a file; add file: tokenizer.json")]
        return []


class Shuffle(Part):
    """Records are shuffled in blocks, and so are the blocks."""

    example: ClassVar[str] = "{block: 8MiB}"

    block: Annotated[int, size(1 << 16, 1 << 30)] = BLOCK_BYTES
    """Bytes of records that are shuffled at a time. A larger block needs more memory."""


class OnError(Part):
    """The treatment of records that cannot be decoded."""

    short: ClassVar[str | None] = "do"
    example: ClassVar[str] = "{do: skip, at_most: 0.1%, in_a_row: 100}"

    do: Annotated[Literal["stop", "skip"], choice("way", ("stop", "skip"))] = "stop"
    """stop at the first one, or skip it."""
    at_most: Annotated[Fraction, share(whole_too=True)] = Field(default_factory=lambda: Fraction(1, 1000))
    """Share of the records that may be skipped; 0.1% by default; ten are always allowed."""
    in_a_row: Annotated[int, whole(0, 1 << 31)] = 100
    """How many records may be skipped in a row."""

    @property
    def budget(self) -> SkipBudget | None:
        """None: the first bad record stops the plan."""
        return SkipBudget(self.at_most, self.in_a_row) if self.do == "skip" else None


class Mix(Part):
    """Weights of the sources from a step on, or reached at a step."""

    example: ClassVar[str] = "{from: 0, weights: {code: 30, prose: 70}}"

    from_: Step | None = Field(default=None, validation_alias="from", serialization_alias="from")
    """First step; the first entry begins at 0."""
    ramp_to: Step | None = None
    """Step at which the weights are reached, linearly from the entry before."""
    weights: dict[str, Annotated[Fraction, decimal("weight")]]
    """Shares of tokens by source, in any unit."""


class Pack(Part):
    """How documents become rows."""

    short: ClassVar[str | None] = "method"
    example: ClassVar[str] = "{method: best_fit}"

    method: Annotated[Packing, choice("method", Packing)] = Packing.BEST_FIT
    """best_fit cuts no document that fits a row; concat lays them end to end and cuts where a row is full."""


class Cost(Part):
    """The cost of a row for a rank; rows are balanced by it."""

    example: ClassVar[str] = "{hidden_size: 4096}"

    hidden_size: Annotated[int, whole(1, 1 << 32)] | None = None
    """Of the model: a token costs 6 × hidden_size, and each pair of tokens of a document 1."""
    linear: Coefficient | None = None
    """Per token."""
    quadratic: Coefficient | None = None
    """Per token²."""
    call: Annotated[str, user_code("function")] | None = None
    """module:function that returns the cost of each sample."""
    columns: dict[str, Coefficient] = Field(default_factory=dict)
    """By column: the price of a row, in addition."""

    def own_problems(self) -> list[Problem]:
        coefficients = {self.linear, self.quadratic} - {None}
        if self.call is not None and self.columns:
            return [Problem(("columns",), "call gives the whole cost of a sample; remove one", of_key=True)]
        if sum((self.hidden_size is not None, bool(coefficients), self.call is not None)) > 1:
            return [Problem((), "give one of hidden_size, linear and quadratic, or call")]
        if coefficients == {0}:
            return [Problem((), "a cost of nothing; give linear or quadratic a positive number")]
        return []

    @property
    def coefficients(self) -> tuple[int, int]:
        """Per token and per token², unless a function says."""
        if self.linear is not None or self.quadratic is not None:
            return self.linear or 0, self.quadratic or 0
        known = cost.Cost.of_hidden_size(self.hidden_size or HIDDEN_SIZE)
        return known.linear, known.quadratic


class Balance(Part):
    """How rows are dealt to ranks and micro-batches."""

    short: ClassVar[str | None] = "method"
    example: ClassVar[str] = "{method: auto, over: micro_batches}"

    method: Annotated[Method, choice("method", Method)] = Method.AUTO
    """auto is the better of greedy and karmarkar_karp; none deals rows as they come."""
    over: Annotated[Over, choice("level", Over)] = Over.MICRO_BATCHES
    """micro_batches if ranks meet at each (FSDP), ranks if they meet once a step (DDP)."""
    loads: Annotated[tuple[str, ...], NAMES] = ()
    """Several in place of the cost, such as [tokens, pixels]: columns, by their rows, and tokens, by their cost alone."""

    def own_problems(self) -> list[Problem]:
        if not self.loads:
            return []
        if len(self.loads) < 2 or len(set(self.loads)) < len(self.loads):
            what = "name several different loads, such as [tokens, pixels]; a single one is what cost says"
            return [Problem(("loads",), what)]
        if self.method is not Method.AUTO:
            return [Problem(("method",), "loads are balanced by a method of their own; remove method")]
        return []


class Until(Part):
    """Where the plan ends: at the first of several bounds."""

    example: ClassVar[str] = "{steps: 200000}"

    steps: Annotated[int, whole(1, STEPS_MAX)] | None = None
    """Number of steps."""
    tokens: Annotated[int, whole(1, _TOKENS_MAX)] | None = None
    """The plan ends after the step that reaches them."""
    exhausted: Annotated[Exhausted, choice("ending", Exhausted)] | None = None
    """first: before the step that an exhausted source lacks; all: after the last sample."""
    last: Annotated[Literal["pad", "drop"], choice("way", ("pad", "drop"))] = "drop"
    """A last step in which a micro-batch has no token: padded, or not written."""
