"""The plan, as YAML and Python write it, and what has to hold between its parts.

A plan is immutable, and every value in it is parsed: numbers are exact, names are those of the YAML (`from` is `from_` in
Python). Everything that is not given has the value that a first plan wants.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final, Literal

from stepfs.errors import UsageError
from stepfs.format.ids import POSITION_BYTES_MAX, SLICES_MAX
from stepfs.format.mesh import Mesh
from stepfs_producer.plan.holds import IDS_ALONE
from stepfs_producer.plan.part import Before, Part, WrongPartError
from stepfs_producer.plan.parts import (
    HIDDEN_SIZE,
    Balance,
    Cost,
    Mix,
    Output,
    Pack,
    Stage,
    Until,
    problems_of_files,
    problems_of_use,
)
from stepfs_producer.plan.rules import Exhausted
from stepfs_producer.plan.sources import AnySource, Defaults, SourceFiles, Tokenizer
from stepfs_producer.plan.step import SourceState, State, position_bytes_max
from stepfs_producer.plan.values import (
    DOCUMENTS,
    NONE,
    Document,
    Parsed,
    Problem,
    Where,
    documents,
    nearest,
    whole,
)

TOKENS_MAX: Final = 1 << 30  # of a step, and of the rows that all sources may owe
IDENTITY_CHARACTERS: Final = 16
DIGEST_CHARACTERS: Final = 32
_TOKENIZER: Final = "huggingface-" + "0" * 16  # the longest identity
_NAME_MAX: Final = 200

VERSION: Final = 1


def problems_of_plan(
    fields: Mapping[str, Any], sources: Mapping[str, Any] | None, weighed: Sequence[Sequence[str]]
) -> list[Problem]:
    """Problems between fields. `fields`: those that could be parsed; `weighed`: names in each entry of the mix.

    `sources` is None if there are none to compare with, which is a mistake of its own.
    """
    problems = [] if sources is None else [*_names(sources), *_unknown_sources(sources, weighed)]
    if "mix" in fields:
        problems += _mix(fields["mix"])
    if "output" in fields and "stages" in fields:
        problems += _lengths(fields["output"], fields["stages"], len(sources or ()))
        if "pack" in fields:
            problems += _alignment(fields["output"], fields["stages"], fields["pack"])
        problems += _lengths_of_sources(fields["output"], fields["stages"], fields.get("sources", {}), sources or {})
    if "output" in fields:
        problems += problems_of_use(fields, fields["output"].columns)
        problems += problems_of_files(fields["output"], fields.get("sources", {}))
    if {"tokenizer", "sources"} <= set(fields) and fields["tokenizer"].file is None:
        problems += [
            Problem(
                ("sources", name, key),
                f"{what} a model's tokenizer; add tokenizer: {{kind: huggingface, file: tokenizer.json}}",
                of_key=True,
            )
            for name, source in fields["sources"].items()
            for key, part, what in (("chat", source.chat, "chats need"), ("fim", source.fim, "fim needs"))
            if part is not None
        ]
    if {"until", "defaults", "sources"} <= set(fields):
        problems += _ending(fields["until"], fields["defaults"], fields["sources"])
    return problems


def position_bytes(sources: Sequence[str]) -> int:
    """Bytes that the position of a plan with these sources can reach."""
    source = SourceState("0" * IDENTITY_CHARACTERS, "0" * DIGEST_CHARACTERS)
    return position_bytes_max(State("0" * DIGEST_CHARACTERS, 0, dict.fromkeys(sources, source), 1, _TOKENIZER))


def _names(sources: Mapping[str, Any]) -> Iterator[Problem]:
    good = []
    for name in sources:
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _NAME_MAX:
            what = f"{name!r} is no name of a source; use 1 to {_NAME_MAX} printable characters"
            yield Problem(("sources", name), what, of_key=True)
        else:
            good.append(name)
    if not sources:
        yield Problem(("sources",), "no source; declare at least one")
    size = position_bytes(good)
    if size > POSITION_BYTES_MAX:
        what = (
            f"the position of {len(good)} sources can reach {size} bytes, the most is {POSITION_BYTES_MAX}; "
            "use fewer sources, or shorter names"
        )
        yield Problem(("sources",), what)


def _unknown_sources(sources: Mapping[str, Any], weighed: Sequence[Sequence[str]]) -> Iterator[Problem]:
    for number, names in enumerate(weighed):
        for name in names:
            if name not in sources:
                what = f"unknown source {name!r}{nearest(name, sources)}"
                yield Problem(("mix", number, "weights", name), what, of_key=True)
    if weighed:
        for name in sources:
            if not any(name in names for names in weighed):
                what = f"source {name!r} has no weight; give it one in the mix (0 keeps it out)"
                yield Problem(("sources", name), what, of_key=True)


def _mix(entries: Sequence[Mix]) -> Iterator[Problem]:
    steps: list[int] = []
    for number, entry in enumerate(entries):
        where = ("mix", number)
        if entry.tokens and len(entries) > 1:
            yield Problem(
                (*where, "tokens"), "budgets hold for the whole plan; give weights where a mix changes", of_key=True
            )
        if not any(entry.drawn.values()):
            yield Problem((*where, "weights"), "all weights are zero; give at least one source a positive weight")
        if entry.ramp_to is not None and entry.from_ is not None:
            yield Problem((*where, "ramp_to"), "give one of from and ramp_to", of_key=True)
        if number == 0 and entry.ramp_to is not None:
            what = "a ramp needs an entry before it; begin with {from: 0, weights: {…}}"
            yield Problem((*where, "ramp_to"), what, of_key=True)
        elif number == 0 and entry.from_:
            yield Problem((*where, "from"), f"the first entry begins at 0, not at {entry.from_}")
        elif number and entry.from_ is None and entry.ramp_to is None:
            yield Problem(where, "say when its weights hold: add from or ramp_to")
        steps.append(entry.from_ or 0 if entry.ramp_to is None else entry.ramp_to)
    for number, (before, after) in enumerate(pairwise(steps), start=1):
        if after <= before and (entries[number].from_ is not None or entries[number].ramp_to is not None):
            key = "from" if entries[number].ramp_to is None else "ramp_to"
            what = f"step {after} does not come after step {before} of the entry before; put them in order"
            yield Problem(("mix", number, key), what)


def _lengths(output: Output, stages: Sequence[Stage], sources: int) -> Iterator[Problem]:
    places: list[tuple[tuple[str | int, ...], int]] = []
    if output.sequence_length is not None:
        places.append((("output", "sequence_length"), output.sequence_length))
        if stages:
            yield Problem(("stages",), "give one of output.sequence_length and stages", of_key=True)
    elif not stages:
        yield Problem(("output",), "sequence_length is missing; add sequence_length: 4096, or stages")
    places += [(("stages", number, "sequence_length"), one.sequence_length) for number, one in enumerate(stages)]
    if stages and stages[0].from_:
        yield Problem(("stages", 0, "from"), f"the first stage begins at 0, not at {stages[0].from_}")
    for number, (before, after) in enumerate(pairwise(stages), start=1):
        if after.from_ <= before.from_:
            what = f"step {after.from_} does not come after step {before.from_} of the stage before; put them in order"
            yield Problem(("stages", number, "from"), what)
    if not places:
        return
    longest = max(length for _, length in places)
    yield from _rows(output, places, longest)
    if longest * sources > TOKENS_MAX:
        what = (
            f"{sources} sources at sequence_length {longest} could owe more tokens than a position holds "
            f"({TOKENS_MAX}); use fewer sources or shorter sequences"
        )
        yield Problem(("sources",), what)


def _alignment(output: Output, stages: Sequence[Stage], pack: Pack) -> Iterator[Problem]:
    """Documents that take multiples of tokens fill rows that are such multiples."""
    align = alignment(output, pack)
    for length in (
        *([output.sequence_length] if output.sequence_length else []),
        *(one.sequence_length for one in stages),
    ):
        if length % align:
            after = length + -length % align
            what = (
                f"documents take multiples of {align} tokens, and rows have {length}; make them {after}, or align less"
            )
            yield Problem(("pack", "align"), what, of_key=True)
            return


def alignment(output: Output, pack: Pack) -> int:
    """A document takes a multiple of so many tokens of its row."""
    return pack.align if isinstance(pack.align, int) else output.mesh.document_multiple


def _lengths_of_sources(
    output: Output, stages: Sequence[Stage], declared: Mapping[str, SourceFiles], names: Mapping[str, Any]
) -> Iterator[Problem]:
    """A source's own length divides the rows, also those of each stage that does not give it another one."""
    rows = (*stages, *([Stage(sequence_length=output.sequence_length)] if output.sequence_length else []))
    for name, source in declared.items():
        for stage in rows:
            if source.sequence_length is not None and name not in stage.lengths:
                place = ("sources", name, "sequence_length")
                yield from _unfit(place, source.sequence_length, stage.from_, stage.sequence_length)
    for number, stage in enumerate(stages):
        for name, length in stage.lengths.items():
            where = ("stages", number, "lengths", name)
            if name not in names:
                yield Problem(where, f"unknown source {name!r}{nearest(name, names)}", of_key=True)
            yield from _unfit(where, length, stage.from_, stage.sequence_length)


def _unfit(where: Where, length: int, step: int, row: int) -> Iterator[Problem]:
    rows = f"the rows of {row} from step {step} on"
    if length > row:
        yield Problem(where, f"{length} tokens have no room in {rows}; choose at most {row}")
    elif row % length:
        small = [one for one in range(1, math.isqrt(row) + 1) if row % one == 0]
        known = sorted({*small, *(row // one for one in small)})
        after = bisect(known, length)
        yield Problem(
            where,
            f"{length} does not divide {rows}, so their ends would stay empty; choose {known[after - 1]} or {known[after]}",
        )


def _rows(output: Output, places: Sequence[tuple[tuple[str | int, ...], int]], longest: int) -> Iterator[Problem]:
    whole = output.micro_batch_tokens or longest
    mesh: Mesh = output.mesh
    for where, length in places:
        if whole % length:
            what = (
                f"sequence_length {length} does not divide micro_batch_tokens {whole}; choose a multiple of each length"
            )
            yield Problem(where, what)
    units = mesh.data_ranks * output.micro_batches
    beside = sum(column.file == "own" for column in output.columns.values())
    files = (units if output.files == "micro_batches" else mesh.data_ranks) * (1 + beside)
    if files > SLICES_MAX and (beside or output.files == "micro_batches"):
        product = "ranks × micro_batches" if output.files == "micro_batches" else "ranks"
        product += " × 1 and columns with file: own" if beside else ""
        what = f"a step of {files} files ({product}) is too large; the most is {SLICES_MAX}"
        yield Problem(("output", "columns") if beside else ("output", "micro_batches"), what)
    tokens = units * whole
    if tokens > TOKENS_MAX:
        what = (
            f"a step of {tokens} tokens (slices × micro_batches × micro_batch_tokens) is too large; "
            f"the most is {TOKENS_MAX}"
        )
        yield Problem(("output",), what)


def _ending(until: Until, defaults: Defaults, sources: Mapping[str, SourceFiles]) -> Iterator[Problem]:
    if until.exhausted is None or until.steps is not None or until.tokens is not None:
        return
    endless = [
        name for name, source in sources.items() if (source if "epochs" in source.given else defaults).epochs is None
    ]
    if until.exhausted is Exhausted.FIRST and len(endless) == len(sources):
        yield Problem(("until", "exhausted"), "no source ever ends; give one epochs, such as epochs: 1")
    if until.exhausted is Exhausted.ALL and endless:
        what = f"{endless[0]!r} never ends; give every source epochs, such as epochs: 1"
        yield Problem(("until", "exhausted"), what)


def _entries(value: object) -> object:
    """`{code: 30}` is a mix of one entry."""
    if isinstance(value, Mapping):
        is_entry = any(isinstance(value.get(key), Mapping) for key in ("weights", "sizes", "tokens"))
        is_entry = is_entry or bool({"from", "ramp_to"} & set(value))
        return (dict(value),) if is_entry else ({"weights": value},)
    return value


def _known_version(value: object) -> int:
    if value not in (VERSION, str(VERSION)):
        raise ValueError(f"version {value} of plan files is unknown; write version: {VERSION}, or upgrade stepfs")
    return VERSION


def _none_is_no_end(value: object) -> object:
    return {} if value is None or value == NONE else value


class Plan(Part):
    """Which sources, in which shares, packed and balanced how."""

    example: ClassVar[str] = "{output: {…}, sources: {…}, mix: {…}}"

    version: Annotated[Literal[1], Parsed(_known_version, {"const": VERSION})] = 1
    """Of the plan file's format."""
    seed: Annotated[int, whole(0, (1 << 64) - 1)] = 0
    """Of every order."""
    output: Output
    stages: tuple[Stage, ...] = ()
    """Sequence lengths by step."""
    tokenizer: Tokenizer = Tokenizer()
    defaults: Defaults = Defaults()
    sources: dict[str, AnySource]
    """By name. The name is part of the order of a source."""
    exclude: Annotated[str | tuple[Document, ...], Parsed(documents, DOCUMENTS)] = ()
    """Documents that are left out: a file of {"source": …, "file": …, "record": …} or {"sha256": …} a line."""
    mix: Annotated[tuple[Mix, ...], Before(_entries, tuple[Mix, ...] | dict[str, Any])] = ()
    """Weights of tokens; by default the same for every source."""
    pack: Pack = Pack()
    cost: Cost = Cost(hidden_size=HIDDEN_SIZE)
    balance: Balance = Balance()
    until: Annotated[Until, Before(_none_is_no_end, Until | Literal["none"])] = Until()
    """Where the plan ends; `none`: only with its sources."""

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch; by default a row of the longest stage."""
        rows = [self.output.sequence_length or 0, *(stage.sequence_length for stage in self.stages)]
        return self.output.micro_batch_tokens or max(rows)

    @property
    def align(self) -> int:
        """A document takes a multiple of so many tokens of its row."""
        return alignment(self.output, self.pack)

    def own_problems(self) -> list[Problem]:
        return problems_of_plan(vars(self), self.sources, [list(entry.drawn) for entry in self.mix])

    @classmethod
    def problems_beside(cls, data: Mapping[Any, Any], found: Mapping[str, Any]) -> list[Problem]:
        sources = data.get("sources")
        known = sources if isinstance(sources, Mapping) else None
        return problems_of_plan(found, known, _weighed(data.get("mix")))


def parsed_plan(settings: Mapping[str, Any]) -> Plan:
    """The plan with these settings, by their YAML names. `UsageError` names all that are wrong."""
    try:
        return Plan.read(settings)
    except WrongPartError as error:
        raise UsageError("; ".join(error.refusal().lines)) from error


def with_ids_alone(plan: Plan) -> Plan:
    """The same plan, for files of ids alone: no plan says so, but `stepfs-produce text`."""
    return plan.changed(output=plan.output.changed(ext=IDS_ALONE))


def _weighed(mix: object) -> list[list[str]]:
    """The names in each entry of a mix that may hold anything."""
    entries = _entries(mix)
    if not isinstance(entries, list | tuple):
        return []
    weights = [
        (entry.get("weights") or entry.get("sizes") or entry.get("tokens"))
        if isinstance(entry, Mapping)
        else getattr(entry, "drawn", {})
        for entry in entries
    ]
    return [[str(name) for name in names] if isinstance(names, Mapping) else [] for names in weights]
