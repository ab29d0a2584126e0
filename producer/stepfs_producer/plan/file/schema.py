"""The plan, as YAML and Python write it: `Plan(output=Output(mesh="dp=8", …), sources={…}, mix=[…])`.

Everything that is not given has the value that a first plan wants. A plan is immutable, and every value in it is parsed:
numbers are exact, names are those of the YAML (`from` is `from_` in Python).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ValidationError

from stepfs.errors import UsageError
from stepfs_producer.plan.file.checks import problems_of_plan
from stepfs_producer.plan.file.columns import Column, Images
from stepfs_producer.plan.file.declared import (
    AnySource,
    Defaults,
    Jsonl,
    Megatron,
    Parquet,
    Source,
    Text,
)
from stepfs_producer.plan.file.part import Part
from stepfs_producer.plan.file.problems import Problem, path_text
from stepfs_producer.plan.file.scalars import NONE, Parsed, whole
from stepfs_producer.plan.file.settings import (
    HIDDEN_SIZE,
    Balance,
    Cost,
    Mix,
    OnError,
    Output,
    Pack,
    Shuffle,
    Stage,
    Tokenizer,
    Until,
)

__all__ = [
    "Balance", "Column", "Cost", "Defaults", "Images", "Jsonl", "Megatron", "Mix", "OnError", "Output", "Pack", "Parquet",
    "Plan", "Shuffle", "Source", "Stage", "Text", "Tokenizer", "Until",
]  # fmt: skip

VERSION: Final = 1


def _entries(value: object) -> object:
    """`{code: 30}` is a mix of one entry."""
    if isinstance(value, Mapping):
        is_entry = isinstance(value.get("weights"), Mapping) or {"from", "ramp_to"} & set(value)
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
    mix: Annotated[tuple[Mix, ...], BeforeValidator(_entries, tuple[Mix, ...] | dict[str, Any])] = ()
    """Weights of tokens; by default the same for every source."""
    pack: Pack = Pack()
    cost: Cost = Cost(hidden_size=HIDDEN_SIZE)
    balance: Balance = Balance()
    until: Annotated[Until, BeforeValidator(_none_is_no_end, Until | Literal["none"])] = Until()
    """Where the plan ends; `none`: only with its sources."""

    def own_problems(self) -> list[Problem]:
        weighed = [list(entry.weights) for entry in self.mix]
        return problems_of_plan(dict(self), self.sources, weighed)

    @classmethod
    def problems_beside(cls, data: object) -> list[Problem]:
        if not isinstance(data, Mapping):
            return []
        sources = data.get("sources")
        known = sources if isinstance(sources, Mapping) else None
        return problems_of_plan(cls.parsed_alone(data), known, _weighed(data.get("mix")))


def parsed_plan(settings: Mapping[str, Any]) -> Plan:
    """The plan with these settings, by their YAML names. `UsageError` names all that are wrong."""
    try:
        return Plan.model_validate(settings)
    except ValidationError as error:
        wrong = [f"{path_text(one['loc'])}: {one['msg']}" for one in error.errors()]
        raise UsageError("; ".join(wrong)) from error


def _weighed(mix: object) -> list[list[str]]:
    """The names in each entry of a mix that may hold anything."""
    entries = _entries(mix)
    if not isinstance(entries, list | tuple):
        return []
    weights = [
        entry.get("weights") if isinstance(entry, Mapping) else getattr(entry, "weights", {}) for entry in entries
    ]
    return [[str(name) for name in names] if isinstance(names, Mapping) else [] for names in weights]
