"""The parts of a plan: its sources, columns, shape of a step, tokenizer, mix, packing, cost, balance and end.

From Python, the files of a source come first: `Parquet("s3://…", text_field="content")`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from stepfs.format.mesh import Mesh, parse_mesh
from stepfs_producer.plan import cost
from stepfs_producer.plan.balance import Method, Over
from stepfs_producer.plan.cost import TOKENS
from stepfs_producer.plan.file.values import (
    NONE,
    Parsed,
    PlanModel,
    Problem,
    Shard,
    choice,
    decimal,
    decimal_text,
    file_names,
    nearest,
    or_none,
    parse_shard,
    share,
    shown,
    size,
    text,
    tokenizer_kind,
    user_code,
    whole,
)
from stepfs_producer.plan.holds import HOLDS, lack
from stepfs_producer.plan.holds import Part as PartOfFile
from stepfs_producer.plan.rules import Exhausted, Packing
from stepfs_producer.plan.samples import Long, SkipBudget

DTYPES: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
_COLUMNS_MAX: Final = 16
_DIMENSIONS_MAX: Final = 8
_ROW_BYTES_MAX: Final = 16 << 20
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,23}", re.ASCII)
_TAKEN: Final = frozenset({
    "input_ids", "labels", "position_ids", "doc_ids", "cu_seqlens", "cu_seqlens_offsets", "spans", "sources",
    "sequence_length", "micro", "tokens", "boundaries", "source", "record", "first",
})  # fmt: skip  # names of a file's arrays, facts and dimensions, and of the columns for cost functions

_LIST: Final = {"type": "array", "items": {"type": ["integer", "string"]}}
EXTENSIONS: Final = tuple(HOLDS)
BLOCK_BYTES: Final = 8 << 20
HIDDEN_SIZE: Final = 4096  # of a model of 7 billion parameters
STEPS_MAX: Final = 1 << 40
LENGTH_MAX: Final = 1 << 24
MICRO_BATCHES_MAX: Final = 1 << 16
_COEFFICIENT_MAX: Final = 1 << 53
_TOKENS_MAX: Final = 1 << 62
_MIX_UNITS: Final = 10**6
_BYTES: Final = "bytes"

Step = Annotated[int, whole(0, STEPS_MAX)]
Length = Annotated[int, whole(1, LENGTH_MAX)]
Coefficient = Annotated[int, whole(0, _COEFFICIENT_MAX)]
_FIELD: Final = text("name of a field")


def _sizes(value: object) -> tuple[int, ...]:
    one = whole(1, _ROW_BYTES_MAX).parse
    if not isinstance(value, list | tuple) or len(value) > _DIMENSIONS_MAX:
        raise ValueError(f"{shown(value)} is no shape; write at most {_DIMENSIONS_MAX} sizes, such as [588]")
    return tuple(one(size) for size in value)


def _names(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise ValueError(f"{shown(value)} names nothing; write a name or a list of names")
    return tuple(text("name").parse(name) for name in names)


def _color(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError(f"{shown(value)} is no color; write [255, 255, 255]")
    return tuple(whole(0, 255).parse(one) for one in value)


NAMES: Final = Parsed(_names, {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})


class Column(PlanModel):
    """An array that samples carry beside their tokens."""

    example: ClassVar[str] = "{dtype: uint8, shape: [588]}"

    dtype: Annotated[str, choice("dtype", DTYPES)]
    """Of numpy."""
    shape: Annotated[tuple[int, ...], Parsed(_sizes, _LIST)]
    """Of one row; a sample has any number of rows."""
    file: Annotated[Literal["rank", "own"], choice("place", ("rank", "own"))] = "rank"
    """rank: in the rank's file; own: in a file beside it, which is fetched only where it is opened."""

    def own_problems(self) -> list[Problem]:
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        if size <= _ROW_BYTES_MAX:
            return []
        return [Problem(("shape",), f"a row of {size} bytes; the most is {_ROW_BYTES_MAX}")]


class Images(PlanModel):
    """Encoded images in the records' fields, decoded before the transform gets them."""

    short: ClassVar[str | None] = "fields"
    example: ClassVar[str] = "{fields: [jpg, png]}"

    fields: Annotated[tuple[str, ...], NAMES]
    """Fields that hold a JPEG, PNG, WebP or GIF (its first frame), or a list of them, where a record has the field."""
    patch: Annotated[int, whole(1, 64)] = 14
    """Pixels of a patch's side: it becomes a row of patch × patch × 3 bytes."""
    merge: Annotated[int, whole(1, 8)] = 2
    """Sides of an image are multiples of so many patches, which a model then merges."""
    patches_max: Annotated[int, whole(1, 1 << 16)] = 4096
    """Larger images are made smaller, to at most so many patches."""
    background: Annotated[tuple[int, ...], Parsed(_color, _LIST)] | None = None
    """Below what is transparent, as [red, green, blue] from 0 to 255; white by default."""

    def own_problems(self) -> list[Problem]:
        if self.patches_max >= self.merge**2:
            return []
        return [Problem(("patches_max",), f"less than the {self.merge**2} patches that are merged")]


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
    if columns and sources and not any(source.transform for source in sources.values()):
        what = "no source has a transform that could give columns; add transform: module:function to one"
        yield Problem(("output", "columns"), what, of_key=True)
    if columns and pack is not None and pack.method is Packing.CONCAT:
        what = "concat cuts documents, and a sample with rows in a column is never cut; use best_fit"
        yield Problem(("pack", "method"), what)
    for name, source in () if pack is None or pack.method is not Packing.CONCAT else (sources or {}).items():
        cut = (
            getattr(source, "chat", None) is not None
            and source.long is not Long.DROP
            and "long" in source.model_fields_set
        )
        if cut or getattr(source, "pair", None) is not None:
            what = f"concat cuts documents, and those of source {name!r} are whole; use best_fit"
            yield Problem(("pack", "method"), what)
    for name in () if cost is None else cost.columns:
        if name not in columns:
            yield Problem(("cost", "columns", name), _unknown("column", name, columns), of_key=True)
    for index, name in enumerate(() if balance is None else balance.loads):
        if name not in {TOKENS, *columns}:
            yield Problem(("balance", "loads", index), _unknown("load", name, (TOKENS, *columns)))


def problems_of_files(output: Output, sources: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of sources whose documents do not fit into the step's files."""
    needs = {
        "chat": PartOfFile.LABELS,
        "pair": PartOfFile.SPANS,
        "mask_field": PartOfFile.LABELS,
        "labels_field": PartOfFile.LABELS,
    }
    for name, source in sources.items():
        for key, part in needs.items():
            if getattr(source, key, None) is not None and (what := lack(output.ext, part)):
                yield Problem(("sources", name, key), what, of_key=True)
        if output.columns and source.fim is not None and source.transform is not None:
            what = "fim rearranges tokens, and rows of columns would not follow them; remove fim, or the columns"
            yield Problem(("sources", name, "fim"), what, of_key=True)


def _unknown(what: str, name: str, known: Sequence[str] | Mapping[str, Column]) -> str:
    advice = nearest(name, known) or f"; declare it: output: {{columns: {{{name}: {Column.example}}}}}"
    return f"unknown {what} {name!r}{advice}"


class Output(PlanModel):
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


class Stage(PlanModel):
    """A sequence length from a step on."""

    example: ClassVar[str] = "{from: 0, sequence_length: 4096}"

    from_: Step = Field(default=0, validation_alias="from", serialization_alias="from")
    """First step."""
    sequence_length: Length
    """Tokens of a row."""
    lengths: dict[str, Length] = Field(default_factory=dict)
    """By source: the most tokens of it that make one document, in place of the source's `sequence_length`."""


class Tokenizer(PlanModel):
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
    chat_template: Annotated[str, text("chat template")] | None = None
    """A file, or the template itself; by default that beside the tokenizer's file."""
    control_tokens: Annotated[Literal["text", "tokens"], choice("way", ("text", "tokens"))] | None = None
    """What a control token is that a text or message spells: text (the default), or the token."""

    def own_problems(self) -> list[Problem]:
        if self.kind == _BYTES and self.file is not None:
            return [Problem(("file",), "kind: bytes has no file; remove the file, or choose another kind")]
        if self.kind != _BYTES and self.file is None:
            return [Problem((), f"kind: {self.kind} needs a file; add file: tokenizer.json")]
        return []


class Shuffle(PlanModel):
    """Records are shuffled in blocks, and so are the blocks."""

    example: ClassVar[str] = "{block: 8MiB}"

    block: Annotated[int, size(1 << 16, 1 << 30)] = BLOCK_BYTES
    """Bytes of records that are shuffled at a time. A larger block needs more memory."""


class OnError(PlanModel):
    """The treatment of records that cannot be decoded."""

    short: ClassVar[str | None] = "do"
    example: ClassVar[str] = "{do: skip, at_most: 0.1%, in_a_row: 100}"

    do: Annotated[Literal["stop", "skip"], choice("way", ("stop", "skip"))] = "stop"
    """stop at the first one, or skip it."""
    at_most: Annotated[Fraction, share(whole_too=True)] = Field(default_factory=lambda: Fraction(1, 1000))
    """Share of the records that may be skipped; 0.1% by default; ten are always allowed."""
    in_a_row: Annotated[int, whole(0, 1 << 31)] = 100
    """How many records may be skipped in a row."""
    file: Annotated[Literal["skip"], choice("way", ("skip",))] | None = None
    """skip: of a damaged file its readable beginning is taken, and the rest counts as one skipped record."""

    def own_problems(self) -> list[Problem]:
        if self.file is None or self.do == "skip":
            return []
        return [Problem(("file",), "the rest of a damaged file counts as a skipped record; add do: skip", of_key=True)]

    @property
    def budget(self) -> SkipBudget | None:
        """None: the first bad record stops the plan."""
        return SkipBudget(self.at_most, self.in_a_row) if self.do == "skip" else None


class Mix(PlanModel):
    """Weights of the sources from a step on, or reached at a step."""

    example: ClassVar[str] = "{from: 0, weights: {code: 30, prose: 70}}"

    from_: Step | None = Field(default=None, validation_alias="from", serialization_alias="from")
    """First step; the first entry begins at 0."""
    ramp_to: Step | None = None
    """Step at which the weights are reached, linearly from the entry before."""
    weights: dict[str, Annotated[Fraction, decimal("weight")]] = Field(default_factory=dict)
    """Shares of tokens by source, in any unit."""
    sizes: dict[str, Annotated[Fraction, decimal("size")]] = Field(default_factory=dict)
    """In place of weights: sizes of the sources, in any unit, such as the tokens that `check` prints."""
    tokens: dict[str, Annotated[int, whole(0, _TOKENS_MAX)]] = Field(default_factory=dict)
    """In place of weights: tokens that each source gives; with all of them the plan ends."""
    temperature: Annotated[Fraction, decimal("temperature", above_zero=True)] | None = None
    """Exponent of the sizes: 1 (the default) draws in proportion, less favours the small ones."""

    def own_problems(self) -> list[Problem]:
        given = sum(map(bool, (self.weights, self.sizes, self.tokens)))
        if given != 1:
            return [Problem((), "give one of weights, sizes and tokens" if given else "'weights' is missing")]
        if self.temperature is not None and not self.sizes:
            what = "a temperature needs sizes: {source: tokens}; check prints the tokens of each"
            return [Problem(("temperature",), what, of_key=True)]
        return []

    @property
    def drawn(self) -> dict[str, Fraction]:
        """The weights, as numbers of six digits where sizes give them."""
        if self.tokens:  # the same shares as decimals of as many digits as the largest budget
            unit = 10 ** min(len(str(max(self.tokens.values()))), 18)
            return {name: Fraction(tokens, unit) for name, tokens in self.tokens.items()}
        if not self.sizes:
            return self.weights
        temperature = self.temperature or Fraction(1)
        with localcontext(Context(prec=28)):  # the same digits everywhere, which floats have not
            powers = {
                name: Fraction(Decimal(decimal_text(size)) ** Decimal(decimal_text(temperature)))
                for name, size in self.sizes.items()
            }
        total = sum(powers.values()) or Fraction(1)
        return {
            name: Fraction(int((2 * power * _MIX_UNITS + total) // (2 * total)), _MIX_UNITS)
            for name, power in powers.items()
        }


class Pack(PlanModel):
    """How documents become rows."""

    short: ClassVar[str | None] = "method"
    example: ClassVar[str] = "{method: best_fit}"

    method: Annotated[Packing, choice("method", Packing)] = Packing.BEST_FIT
    """best_fit cuts no document that fits a row; concat lays them end to end and cuts where a row is full."""


class Cost(PlanModel):
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
        known = cost.CostModel.of_hidden_size(self.hidden_size or HIDDEN_SIZE)
        return known.linear, known.quadratic


class Balance(PlanModel):
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


class Until(PlanModel):
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


def _date(value: object) -> str:
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", str(value)):
        return str(value)
    raise ValueError(f"{shown(value)} is no date; write it as 2026-01-31")


class Chat(PlanModel):
    """Conversations in records: rendered by the tokenizer's chat template, learned by turns."""

    short: ClassVar[str | None] = "messages"
    example: ClassVar[str] = "{messages: messages, learn: assistant}"

    messages: Annotated[str, _FIELD] = "messages"
    """Field of the list of messages."""
    role: Annotated[str, _FIELD] = "role"
    """Of a message; `from` in ShareGPT."""
    content: Annotated[str, _FIELD] = "content"
    """Of a message; `value` in ShareGPT."""
    roles: dict[str, Annotated[str, text("role")]] = Field(default_factory=dict)
    """The records' own names of roles, such as {human: user, gpt: assistant}."""
    prompt: Annotated[tuple[str, ...], NAMES] | None = None
    """In place of messages: fields that make the user's turn, such as [instruction, input]."""
    completion: Annotated[str, _FIELD] | None = None
    """Field of the answer to it, such as output."""
    system: Annotated[str, _FIELD] | None = None
    """Field of a system message that comes first."""
    tools: Annotated[str, _FIELD] | None = None
    """Field of the tools that templates get, as a list or as JSON."""
    learn: Annotated[Literal["assistant", "last", "all"], choice("way", ("assistant", "last", "all"))] = "assistant"
    """assistant: what the assistant says; last: its last turn; all. A message with `"train": false` is never learned."""
    date: Annotated[str, Parsed(_date, {"type": "string", "format": "date"})] | None = None
    """The day that templates take for today's."""

    def own_problems(self) -> list[Problem]:
        problems = []
        if (self.prompt is None) != (self.completion is None):
            missing = "completion" if self.completion is None else "prompt"
            problems.append(Problem((), f"prompt and completion stand together; add {missing}"))
        if self.prompt is not None and self.messages != Chat.model_fields["messages"].default:
            problems.append(Problem(("messages",), "give one of messages and prompt", of_key=True))
        return problems


class Pair(PlanModel):
    """Preference pairs in records: two documents that stay together. With `chat`, rendered by its template."""

    short: ClassVar[str | None] = "chosen"
    example: ClassVar[str] = "{prompt: prompt, chosen: chosen, rejected: rejected}"

    prompt: Annotated[str, _FIELD] | None = None
    """Field of the prompt; by default `prompt` where a record has it, else what both answers begin with."""
    chosen: Annotated[str, _FIELD] = "chosen"
    """Field of the answer to be preferred: a text, or messages."""
    rejected: Annotated[str, _FIELD] = "rejected"
    """Field of the other one."""


def _fim_tokens(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError(f"{shown(value)} are no three tokens; write [<fim_prefix>, <fim_middle>, <fim_suffix>]")
    return tuple(text("token").parse(one) for one in value)


class Fim(PlanModel):
    """Fill in the middle: documents whose middle comes last."""

    example: ClassVar[str] = "{rate: 0.5, spm: 0.5, tokens: [<fim_prefix>, <fim_middle>, <fim_suffix>]}"

    tokens: Annotated[tuple[str, str, str], Parsed(_fim_tokens, _LIST)]
    """Before the prefix, the middle and the suffix, by name."""
    rate: Annotated[Fraction, share(whole_too=True)] = Field(default_factory=lambda: Fraction(1, 2))
    """Share of the documents; half by default."""
    spm: Annotated[Fraction, share(whole_too=True)] = Field(default_factory=lambda: Fraction(1, 2))
    """Share of those in which the suffix comes before the prefix; half by default."""
    level: Annotated[Literal["characters", "tokens"], choice("level", ("characters", "tokens"))] = "characters"
    """Where texts are cut: between characters, or between tokens, as token ids always are."""


def _none_shuffles_nothing(value: object) -> object:
    return None if value == NONE else value


class Defaults(PlanModel):
    """Settings of every source that does not say otherwise."""

    example: ClassVar[str] = "{shuffle: {block: 8MiB}, long: split}"

    shuffle: Annotated[Shuffle | None, BeforeValidator(_none_shuffles_nothing, Shuffle | Literal["none"] | None)] = (
        Shuffle()
    )
    """In which blocks records are shuffled; `none`: as stored."""
    long: Annotated[Long, choice("way", Long)] = Long.SPLIT
    """What becomes of a document longer than a row, or than the sequence_length of its source: split, truncate or drop."""
    epochs: Annotated[Fraction | None, or_none(decimal("number of epochs", above_zero=True))] = None
    """How often the source is read, such as 2.5; `none`: without end."""
    on_error: OnError = OnError()
    """What becomes of records that cannot be decoded."""
    holdout: Annotated[Fraction, share(whole_too=False)] = Field(default_factory=lambda: Fraction(0))
    """Share of the records that only a run with --holdout produces."""
    endpoint_url: Annotated[str, text("URL")] | None = None
    """Of the S3 that holds the files, if it is not that of the lake."""
    profile: Annotated[str, text("name of a profile")] | None = None
    """Of the credentials for it."""


class SourceFiles(Defaults):
    """A source."""

    example: ClassVar[str] = "{format: jsonl, files: /data/web/}"
    places: ClassVar[frozenset[str]] = frozenset({"files", "endpoint_url", "profile"})  # where it lies, not what it is

    files: Annotated[
        tuple[str, ...],
        Parsed(file_names, {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
    ]
    """Files, directories and globs; s3://, gs:// and az:// URLs of them."""
    shard: Annotated[Shard, Parsed(parse_shard, {"type": "string"})] | None = None
    """i/n: the i-th of n parts, counted from 0, into which a hash of their bytes deals the records."""
    sequence_length: Length | None = None
    """The most tokens that make one document, if that is less than a row; unless a stage's `lengths` say so."""
    transform: Annotated[str, user_code("function")] | None = None
    """module:function that makes a sample of a whole record."""
    fim: Fim | None = None
    """Fill in the middle, of each document by itself."""
    version: Annotated[str, text("version", empty=True)] = ""
    """Of your own code: change it when the code gives other samples."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        # Each class below says so again: type checkers else derive an __init__ from its fields.
        if files:
            settings["files"] = files
        super().__init__(**settings)


class Jsonl(SourceFiles):
    """Files of one JSON object a line."""

    format: Literal["jsonl"] = "jsonl"
    text_field: Annotated[str, _FIELD] = "text"
    """Field of the object that holds the text; meta.text: of an object within it."""
    tokens_field: Annotated[str, _FIELD] | None = None
    """Field of token ids, in place of text."""
    mask_field: Annotated[str, _FIELD] | None = None
    """Field beside the ids: 0 where the loss ignores the token."""
    labels_field: Annotated[str, _FIELD] | None = None
    """Field beside the ids: -100 where the loss ignores the token."""
    chat: Chat | None = None
    """In place of text: conversations."""
    pair: Pair | None = None
    """In place of text: pairs of answers, which are text unless `chat` renders them."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)

    def own_problems(self) -> list[Problem]:
        return _tokens_alone(self) + _chats_alone(self)


class Text(SourceFiles):
    """Files of text."""

    format: Literal["text"] = "text"
    records: Annotated[Literal["lines", "files"], choice("kind of records", ("lines", "files"))] = "lines"
    """lines: each line that is not blank; files: each file, and pieces of about 1 MiB of a longer one."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)


class Parquet(SourceFiles):
    """Parquet files: a record is a row."""

    format: Literal["parquet"] = "parquet"
    text_field: Annotated[str, _FIELD] = "text"
    """Column that holds the text."""
    tokens_field: Annotated[str, _FIELD] | None = None
    """Column of token ids, in place of text."""
    mask_field: Annotated[str, _FIELD] | None = None
    """Column beside the ids: 0 where the loss ignores the token."""
    labels_field: Annotated[str, _FIELD] | None = None
    """Column beside the ids: -100 where the loss ignores the token."""
    columns: Annotated[tuple[str, ...], NAMES] | None = None
    """The only columns that are read for the transform; by default all, and for a chat its own."""
    images: Images | None = None
    """Columns of encoded images, which the transform gets as patches."""
    chat: Chat | None = None
    """In place of text: conversations."""
    pair: Pair | None = None
    """In place of text: pairs of answers, which are text unless `chat` renders them."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)

    def own_problems(self) -> list[Problem]:
        problems = _tokens_alone(self)
        if self.tokens_field is not None and self.images is not None:
            problems.append(Problem(("images",), "give one of images and tokens_field"))
        if self.columns is not None and self.transform is None:
            problems.append(Problem(("columns",), "columns are a transform's; add transform: module:function"))
        return problems + _images_alone(self.images, self.transform) + _chats_alone(self)


class Table(SourceFiles):
    """Records with fields: Arrow, CSV or TSV, an array of JSON objects, samples of WebDataset."""

    format: Annotated[
        Literal["arrow", "csv", "json", "webdataset"], choice("format", ("arrow", "csv", "json", "webdataset"))
    ]
    """Kind of files."""
    text_field: Annotated[str, _FIELD] = "text"
    """Field that holds the text; of webdataset the end of a member's name, such as txt."""
    images: Images | None = None
    """Fields of encoded images, which the transform gets as patches."""
    chat: Chat | None = None
    """In place of text: conversations."""
    pair: Pair | None = None
    """In place of text: pairs of answers, which are text unless `chat` renders them."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)

    def own_problems(self) -> list[Problem]:
        return _images_alone(self.images, self.transform) + _chats_alone(self)


class Megatron(SourceFiles):
    """Token ids in pairs of .bin and .idx files."""

    format: Literal["megatron"] = "megatron"

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)


class Source(SourceFiles):
    """A format of your own: `module:Class`."""

    format: Annotated[str, user_code("class")]
    """The class that reads it."""
    text_field: Annotated[str, _FIELD] = "text"
    """For the class."""
    options: dict[str, Annotated[str, text("option", empty=True)]] = Field(default_factory=dict)
    """For the class, as text."""
    images: Images | None = None
    """Fields of encoded images, which the transform gets as patches."""
    chat: Chat | None = None
    """In place of text: conversations."""
    pair: Pair | None = None
    """In place of text: pairs of answers, which are text unless `chat` renders them."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)

    def own_problems(self) -> list[Problem]:
        return _images_alone(self.images, self.transform) + _chats_alone(self)


def _images_alone(images: Images | None, transform: str | None) -> list[Problem]:
    if images is None or transform is not None:
        return []
    return [Problem(("images",), "images need a transform to put them into a sample; add transform: module:function")]


def _tokens_alone(source: Jsonl | Parquet) -> list[Problem]:
    problems = [
        Problem((name,), f"{name} stands beside token ids; add tokens_field: input_ids, or remove it")
        for name in ("mask_field", "labels_field")
        if getattr(source, name) is not None and source.tokens_field is None
    ]
    if source.mask_field is not None and source.labels_field is not None:
        problems.append(Problem(("labels_field",), "give one of mask_field and labels_field"))
    if source.tokens_field is not None and "text_field" in source.model_fields_set:
        problems.append(Problem(("text_field",), "give one of text_field and tokens_field"))
    return problems


def _chats_alone(source: Jsonl | Parquet | Table | Source) -> list[Problem]:
    """A conversation or a pair is the whole record."""
    given, chat, pair = source.model_fields_set, source.chat, source.pair
    if chat is None and pair is None:
        return []
    what = "chat" if pair is None else "pair"
    problems = [
        Problem((name,), f"give one of {what} and {name}", of_key=True)
        for name in ("text_field", "tokens_field", "transform", "images", "fim")
        if name in given and getattr(source, name, None) is not None
    ]
    if pair is not None and "long" in given and source.long is not Long.DROP:
        problems.append(
            Problem(("long",), "a pair is never cut: pairs longer than a row are dropped and counted; use drop")
        )
    if pair is not None and chat is not None:
        problems += [
            Problem(("chat", name), f"the answers of a pair are learned; remove {name}", of_key=True)
            for name in ("messages", "prompt", "completion", "learn")
            if getattr(chat, name) != Chat.model_fields[name].default
        ]
    elif chat is not None and chat.learn == "last" and "long" in given and source.long is not Long.DROP:
        problems.append(Problem(("long",), "only the last turn is learned, and cut chats lack it; use drop"))
    return problems


_FORMATS: Final[Mapping[str, type[SourceFiles]]] = {
    "jsonl": Jsonl,
    "text": Text,
    "parquet": Parquet,
    "megatron": Megatron,
    **dict.fromkeys(("arrow", "csv", "json", "webdataset"), Table),
}


def _refuse_format(value: object) -> str:
    known = nearest(value if isinstance(value, str) else "", _FORMATS)
    raise ValueError(f"unknown format {shown(value)}{known}")


class _Unknown(SourceFiles):
    """A source without a known format: its other settings are looked at all the same."""

    format: Annotated[str, Parsed(_refuse_format, {})]
    records: Any = None
    text_field: Any = None
    tokens_field: Any = None
    mask_field: Any = None
    labels_field: Any = None
    columns: Any = None
    options: Any = None
    images: Any = None
    chat: Any = None
    pair: Any = None


def _of_its_format(value: object) -> object:
    if not isinstance(value, Mapping):
        return value if isinstance(value, SourceFiles) else Jsonl.model_validate(value)
    kind = value.get("format")
    if isinstance(kind, str) and ":" in kind:
        return Source.model_validate(value)
    if isinstance(kind, str) and kind in _FORMATS:
        return _FORMATS[kind].model_validate(value)
    return _Unknown.model_validate(value)


AnySource = Annotated[Jsonl | Text | Parquet | Table | Megatron | Source, BeforeValidator(_of_its_format)]
