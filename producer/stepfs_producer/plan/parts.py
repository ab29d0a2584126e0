"""The parts of a plan beside its sources: shape of a step, columns, mix, packing, cost, balance and end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Final, Literal

from stepfs.format.mesh import Mesh, parse_mesh
from stepfs_producer.plan import cost
from stepfs_producer.plan.balance import Method, Over
from stepfs_producer.plan.cost import TOKENS
from stepfs_producer.plan.holds import HOLDS, IDS_ALONE, lack
from stepfs_producer.plan.holds import Part as PartOfFile
from stepfs_producer.plan.part import Key, Part
from stepfs_producer.plan.rules import Exhausted, Packing
from stepfs_producer.plan.sources import LENGTH_MAX, PIXELS, Column, Length, Long, SourceFiles
from stepfs_producer.plan.values import (
    Parsed,
    Problem,
    choice,
    decimal,
    decimal_text,
    names,
    nearest,
    user_code,
    whole,
)

_COLUMNS_MAX: Final = 16
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,23}", re.ASCII)
_MESH: Final = "mesh"
_TAGS: Final = "tags"  # of a file, where a source has any
_TAKEN: Final = frozenset({
    "input_ids", "labels", "position_ids", "doc_ids", "cu_seqlens", "cu_seqlens_offsets", "cu_seqlens_true", "spans",
    "last_labels", "label_bits", "sources",
    "sequence_length", "micro", "tokens", "boundaries", "source", "record", "first",
})  # fmt: skip  # names of a file's arrays, facts and dimensions, and of the columns for cost functions

EXTENSIONS: Final = tuple(ext for ext in HOLDS if ext != IDS_ALONE)
HIDDEN_SIZE: Final = 4096  # of a model of 7 billion parameters
STEPS_MAX: Final = 1 << 40
MICRO_BATCHES_MAX: Final = 1 << 16
_COEFFICIENT_MAX: Final = 1 << 53
_TOKENS_MAX: Final = 1 << 62
_MIX_UNITS: Final = 10**6

Step = Annotated[int, whole(0, STEPS_MAX)]
Coefficient = Annotated[int, whole(0, _COEFFICIENT_MAX)]


def _extension() -> Parsed:
    known = choice("extension", EXTENSIONS)

    def parse(value: object) -> object:
        if value == IDS_ALONE:
            raise ValueError(
                f"{IDS_ALONE} files hold token ids alone, so only `stepfs-produce text` makes them; choose {EXTENSIONS[0]}, or "
                ".npy where a trainer maps them"
            )
        return known.parse(value)

    return Parsed(parse, known.schema)


def problems_of_columns(columns: Mapping[str, Column], ext: str) -> Iterator[Problem]:
    """Problems of `output.columns`, below `output`."""
    where = "columns"
    if columns and (what := lack(ext, PartOfFile.COLUMNS)):
        yield Problem((where,), what, of_key=True)
    if len(columns) > _COLUMNS_MAX:
        yield Problem((where,), f"{len(columns)} columns; the most is {_COLUMNS_MAX}")
    for name in columns:
        if not _NAME.fullmatch(name) or name in _TAKEN or name.endswith("_counts"):
            what = f"{name!r} is no name of a column; use up to 24 of a-z, 0-9 and _, and none of the file's own arrays"
            yield Problem((where, name), what, of_key=True)


def problems_of_use(fields: Mapping[str, Any], columns: Mapping[str, Column]) -> Iterator[Problem]:
    """Problems between the columns and the rest of a plan."""
    sources, pack, cost, balance = (fields.get(name) for name in ("sources", "pack", "cost", "balance"))
    if columns and sources and not any(source.gives_columns for source in sources.values()):
        what = "no source has a transform that could give columns; add transform: module:function to one"
        yield Problem(("output", "columns"), what, of_key=True)
    if columns and pack is not None and pack.method is Packing.CONCAT:
        what = "concat cuts documents, and a sample with rows in a column is never cut; use best_fit"
        yield Problem(("pack", "method"), what)
    for name, source in () if pack is None or pack.method is not Packing.CONCAT else (sources or {}).items():
        said = [one.long for one in (source, fields.get("defaults")) if one is not None and "long" in one.given]
        cut = source.is_cut_by_turns and said and said[0] is not Long.DROP
        if cut or source.pair is not None or source.fim is not None:
            what = f"concat cuts documents, and those of source {name!r} are whole; use best_fit"
            yield Problem(("pack", "method"), what)
    for name in () if cost is None else cost.columns:
        if name not in columns:
            yield Problem(("cost", "columns", name), _unknown("column", name, columns), of_key=True)
    for index, name in enumerate(() if balance is None else balance.loads):
        if name not in {TOKENS, *columns}:
            yield Problem(("balance", "loads", index), _unknown("load", name, (TOKENS, *columns)))


def problems_of_files(output: Output, sources: Mapping[str, SourceFiles]) -> Iterator[Problem]:
    """Problems of sources whose documents do not fit into the step's files."""
    for name, source in sources.items():
        if source.pair is not None and (what := lack(output.ext, PartOfFile.SPANS)):
            yield Problem(("sources", name, "pair"), what, of_key=True)
        if source.encoded_columns:
            for problem in _problems_of_encoded(name, output, sources):
                yield Problem(("sources", name, "images", "decode"), problem, of_key=True)
        if source.tag is not None and (what := lack(output.ext, PartOfFile.TAGS)):
            yield Problem(("sources", name, "tag"), what, of_key=True)
        if source.tag is not None and _TAGS in output.columns:
            what = f"the tags of source {name!r} have this name in the files; give the column another one"
            yield Problem(("output", "columns", _TAGS), what, of_key=True)
        for column, need in source.image_columns.items():
            given = output.columns.get(column)
            if given is None or (given.dtype, given.shape) != (need.dtype, need.shape):
                what = f"{{{column}: {{dtype: {need.dtype}, shape: {list(need.shape)}}}}}"
                what = f"images of chats become columns; declare output: {{columns: {what}}}"
                yield Problem(("sources", name, "images"), what, of_key=True)
        if output.columns and source.fim is not None and source.transform is not None:
            what = "fim rearranges tokens, and rows of columns would not follow them; remove fim, or the columns"
            yield Problem(("sources", name, "fim"), what, of_key=True)


def _problems_of_encoded(name: str, output: Output, sources: Mapping[str, SourceFiles]) -> Iterator[str]:
    """Problems of images that a reader decodes."""
    if what := lack(output.ext, PartOfFile.ENCODED):
        yield what
    if PIXELS in output.columns and output.columns[PIXELS].file == "own":
        yield f"images that a reader decodes stand in the rank's file; remove file: own of the column {PIXELS}"
    for column in sources[name].encoded_columns.keys() & output.columns.keys():
        yield f"the file's own array is called {column}; give that column another name"
    for other, one in sources.items():
        if one.gives_columns and not one.encoded_columns:
            yield f"source {other!r} gives columns with pixels of its own; let the images of both be decoded in one place"


def _unknown(what: str, name: str, known: Sequence[str] | Mapping[str, Column]) -> str:
    advice = nearest(name, known) or f"; declare it: output: {{columns: {{{name}: {Column.example}}}}}"
    return f"unknown {what} {name!r}{advice}"


class Output(Part):
    """The files of a step."""

    example: ClassVar[str] = '{ext: .safetensors, mesh: "dp=8", sequence_length: 4096}'
    refused: ClassVar[Mapping[str, str]] = {"parts": "parts: several parts are not supported yet; remove the key"}

    ext: Annotated[Literal[".safetensors", ".npy", ".pt", ".tar"], _extension()] = ".safetensors"
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
    arrays: Annotated[Literal["full", "compact"], choice("kind of arrays", ("full", "compact"))] = "full"
    """compact: those that determine the others, a tenth of the bytes; `StepDataset` gives back the full ones."""
    columns: dict[str, Column] = field(default_factory=dict)
    """By name: arrays that transforms give beside the tokens."""

    def own_problems(self) -> list[Problem]:
        problems = list(problems_of_columns(self.columns, self.ext))
        if self.arrays == "compact" and (what := lack(self.ext, PartOfFile.COMPACT)):
            problems.append(Problem(("arrays",), what, of_key=True))
        return problems


class Stage(Part):
    """A sequence length from a step on."""

    example: ClassVar[str] = "{from: 0, sequence_length: 4096}"

    from_: Annotated[Step, Key("from")] = 0
    """First step."""
    sequence_length: Length
    """Tokens of a row."""
    lengths: dict[str, Length] = field(default_factory=dict)
    """By source: the most tokens of it that make one document, in place of the source's `sequence_length`."""


class Mix(Part):
    """Weights of the sources from a step on, or reached at a step."""

    example: ClassVar[str] = "{from: 0, weights: {code: 30, prose: 70}}"

    from_: Annotated[Step | None, Key("from")] = None
    """First step; the first entry begins at 0."""
    ramp_to: Step | None = None
    """Step at which the weights are reached, linearly from the entry before."""
    weights: dict[str, Annotated[Fraction, decimal("weight")]] = field(default_factory=dict)
    """Shares of tokens by source, in any unit."""
    sizes: dict[str, Annotated[Fraction, decimal("size")]] = field(default_factory=dict)
    """In place of weights: sizes of the sources, in any unit, such as the tokens that `check` prints."""
    tokens: dict[str, Annotated[int, whole(0, _TOKENS_MAX)]] = field(default_factory=dict)
    """In place of weights: tokens that each source gives; with all of them the plan ends."""
    alpha: Annotated[Fraction, decimal("exponent", above_zero=True)] | None = None
    """Exponent of the sizes: 1 (the default) draws in proportion, less favours the small ones."""
    temperature: Annotated[Fraction, decimal("temperature", above_zero=True)] | None = None
    """1 ÷ alpha, as for T5 and NLLB: 1 (the default) draws in proportion, more favours the small sources."""

    def own_problems(self) -> list[Problem]:
        given = sum(map(bool, (self.weights, self.sizes, self.tokens)))
        if given != 1:
            return [Problem((), "give one of weights, sizes and tokens" if given else "'weights' is missing")]
        if self.alpha is not None and self.temperature is not None:
            return [Problem(("temperature",), "give one of alpha and temperature", of_key=True)]
        return [
            Problem((name,), f"{name} needs sizes: {{source: tokens}}; check prints the tokens of each", of_key=True)
            for name in ("alpha", "temperature")
            if getattr(self, name) is not None and not self.sizes
        ]

    @property
    def drawn(self) -> dict[str, Fraction]:
        """The weights, as numbers of six digits where sizes give them."""
        if self.tokens:  # the same shares as decimals of as many digits as the largest budget
            unit = 10 ** min(len(str(max(self.tokens.values()))), 18)
            return {name: Fraction(tokens, unit) for name, tokens in self.tokens.items()}
        if not self.sizes:
            return self.weights
        with localcontext(Context(prec=28)) as exact:  # the same digits everywhere, which floats have not
            alpha = Decimal(decimal_text(self.alpha or Fraction(1)))
            if self.temperature is not None:
                alpha = exact.divide(Decimal(1), Decimal(decimal_text(self.temperature)))
            powers = {name: Fraction(Decimal(decimal_text(size)) ** alpha) for name, size in self.sizes.items()}
        total = sum(powers.values()) or Fraction(1)
        return {
            name: Fraction(int((2 * power * _MIX_UNITS + total) // (2 * total)), _MIX_UNITS)
            for name, power in powers.items()
        }


def _alignment(value: object) -> int | str:
    return _MESH if value == _MESH else whole(1, LENGTH_MAX).parse(value)


class Pack(Part):
    """How documents become rows."""

    short: ClassVar[str | None] = "method"
    example: ClassVar[str] = "{method: best_fit}"

    method: Annotated[Packing, choice("method", Packing)] = Packing.BEST_FIT
    """best_fit cuts no document that fits a row; concat lays them end to end and cuts where a row is full."""
    align: Annotated[
        int | Literal["mesh"], Parsed(_alignment, {"anyOf": [whole(1, LENGTH_MAX).schema, {"const": _MESH}]})
    ] = 1
    """Each document takes a multiple of so many tokens of its row, padded; `mesh`: 2 × cp × tp, as context and sequence
    parallelism cut it."""

    def own_problems(self) -> list[Problem]:
        if self.align == 1 or self.method is Packing.BEST_FIT:
            return []
        return [Problem(("align",), "concat lays documents end to end; use best_fit, or remove align", of_key=True)]


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
    columns: dict[str, Coefficient] = field(default_factory=dict)
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
        known = cost.CostModel.of_hidden_size(self.hidden_size or HIDDEN_SIZE)
        return known.linear, known.quadratic


class Balance(Part):
    """How rows are dealt to ranks and micro-batches."""

    short: ClassVar[str | None] = "method"
    example: ClassVar[str] = "{method: auto, over: micro_batches}"

    method: Annotated[Method, choice("method", Method)] = Method.AUTO
    """auto is the better of greedy and karmarkar_karp; none deals rows as they come."""
    over: Annotated[Over, choice("level", Over)] = Over.MICRO_BATCHES
    """micro_batches if ranks meet at each (FSDP), ranks if they meet once a step (DDP)."""
    loads: Annotated[tuple[str, ...], names()] = ()
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
    """The end of a plan: the first of several bounds."""

    example: ClassVar[str] = "{steps: 200000}"

    steps: Annotated[int, whole(1, STEPS_MAX)] | None = None
    """Number of steps."""
    tokens: Annotated[int, whole(1, _TOKENS_MAX)] | None = None
    """The plan ends after the step that reaches them."""
    exhausted: Annotated[Exhausted, choice("ending", Exhausted)] | None = None
    """first: before the step that an exhausted source lacks; all: after the last sample."""
    last: Annotated[Literal["pad", "drop"], choice("way", ("pad", "drop"))] = "drop"
    """A last step in which a micro-batch has no token: padded, or not written."""
