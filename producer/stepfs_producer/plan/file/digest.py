"""The text of a plan with all defaults filled in, its digest, and the changes between two plans.

Two plan files that mean the same have the same text. The text is itself a plan, so a kept one can be read again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from fractions import Fraction
from typing import Any, ClassVar, Final

from pydantic import ValidationError

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.mesh import Mesh
from stepfs_producer.plan.file.parts import AnySource, Mix, OnError, SourceFiles, Stage
from stepfs_producer.plan.file.schema import Plan
from stepfs_producer.plan.file.values import NONE, PlanModel, Shard, Where, decimal_text, path_text
from stepfs_producer.plan.samples import Long

Normalised = dict[str, Any]  # JSON
_ABSENT: Final = object()


def with_defaults(plan: Plan) -> dict[str, AnySource]:
    """The sources in order of names, each with the settings of `defaults` that it does not have itself."""
    common = {name: getattr(plan.defaults, name) for name in type(plan.defaults).model_fields}
    found = {}
    for name, source in sorted(plan.sources.items()):
        update = {key: value for key, value in common.items() if key not in source.model_fields_set}
        whole = getattr(source, "chat", None) or getattr(source, "pair", None)
        if whole is not None and "long" not in source.model_fields_set:
            update["long"] = Long.DROP  # a turn is never cut
        found[name] = source.model_copy(update=update)
    return found


def stages_of(plan: Plan) -> tuple[Stage, ...]:
    """Sequence lengths by step, also of a plan that has a single one. `lengths` hold those of sources, where they are less."""
    stages = plan.stages
    if plan.output.sequence_length is not None:
        stages = (Stage(sequence_length=plan.output.sequence_length),)
    own = {name: one.sequence_length for name, one in sorted(plan.sources.items()) if one.sequence_length}
    return tuple(
        stage.model_copy(
            update={
                "lengths": {
                    name: length
                    for name, length in sorted({**own, **stage.lengths}.items())
                    if length != stage.sequence_length
                }
            }
        )
        for stage in stages
    )


def mix_of(plan: Plan) -> tuple[Mix, ...]:
    """The entries of the mix, each with its step; without any, all sources weigh the same."""
    entries = plan.mix or (Mix(weights=dict.fromkeys(plan.sources, Fraction(1))),)
    return tuple(
        entry.model_copy(
            update={"weights": entry.drawn, "sizes": {}, "tokens": {}, "temperature": None}
            | ({"from_": entry.from_ or 0} if entry.ramp_to is None else {})
        )
        for entry in entries
    )


def tokens_max(plan: Plan) -> int | None:
    """Tokens after which the plan ends: those of `until`, or the budgets of its sources."""
    budget = sum(plan.mix[0].tokens.values()) if plan.mix else 0
    return plan.until.tokens or budget or None


def micro_batch_tokens(plan: Plan) -> int:
    """Tokens of a micro-batch; by default a row of the longest stage."""
    return plan.output.micro_batch_tokens or max(stage.sequence_length for stage in stages_of(plan))


def normalised(plan: Plan) -> Normalised:
    """Every setting by its YAML name, as text, whole numbers, lists and mappings."""
    cost, output = plan.cost, {"sequence_length": None, "micro_batch_tokens": micro_batch_tokens(plan)}
    if cost.call is None:
        linear, quadratic = cost.coefficients
        cost = cost.model_copy(update={"hidden_size": None, "linear": linear, "quadratic": quadratic})
    filled = plan.model_copy(
        update={
            "output": plan.output.model_copy(update=output),
            "stages": stages_of(plan),
            "sources": {name: _filled(source) for name, source in with_defaults(plan).items()},
            "mix": mix_of(plan),
            "until": plan.until.model_copy(update={"tokens": tokens_max(plan)}),
            "cost": cost,
        }
    )
    found: Normalised = _plain(filled)
    del found["defaults"]  # every source has them
    return found


def _filled(source: AnySource) -> AnySource:
    """A source without what another setting says, or makes meaningless."""
    stops = {"on_error": OnError()} if source.on_error.do == "stop" else {}
    return source.model_copy(update={"sequence_length": None, **stops})


def _plain(value: object) -> Any:
    """A value of a plan as JSON. Parts have the names of YAML, and nothing for what is not given."""
    match value:
        case PlanModel():
            found = {}
            for name, field in type(value).model_fields.items():
                one, default = getattr(value, name), field.get_default(call_default_factory=True, validated_data={})
                if one != default or one not in (None, {}, ()):
                    # Text has no null, and YAML would read the word.
                    found[field.serialization_alias or name] = NONE if one is None else _plain(one)
            if {"tokens_field", "chat", "pair"} & found.keys() and "text_field" in found:
                del found["text_field"]  # one or the other
            return found
        case Mapping():
            return {name: _plain(one) for name, one in value.items()}
        case Fraction():
            return decimal_text(value)
        case Mesh() | Shard() | StrEnum():
            return str(value)
        case tuple():
            return [_plain(one) for one in value]
        case _:
            return value


def plan_text(plan: Plan) -> str:
    """The text to keep: canonical JSON of the normalised plan."""
    return json.dumps(normalised(plan), ensure_ascii=False, sort_keys=True, indent=1) + "\n"


def plan_of_text(text: str) -> Plan:
    """The plan of a kept text. `CorruptError` if it is none."""
    try:
        return Plan.model_validate(json.loads(text))
    except (ValueError, ValidationError, RecursionError) as error:
        raise CorruptError("a kept plan cannot be read; remove it, the next start keeps it again") from error


def plan_digest(plan: Plan) -> str:
    """32 hexadecimal digits."""
    return hashlib.blake2b(plan_text(plan).encode(), digest_size=16).hexdigest()


class PlanChangedError(RefusedError):
    """The plan is not the one of the steps so far. The lines are the changes: accept or undo them."""

    several_lines: ClassVar[bool] = True


def differences(before: Normalised, after: Normalised) -> list[str]:
    """Lines such as `mix[0].weights.code: 30 → 35`; none if the plans are the same.

    Where the files of a source lie is no change, since their listing is compared with that of before.
    """
    return [
        _printable(f"{path_text(where)}: {_shown(old)} → {_shown(new)}")
        for where, old, new in _changes((), before, after)
        if not (where[0] == "sources" and where[2:3] and where[2] in SourceFiles.places)
    ]


def _changes(where: Where, before: object, after: object) -> Iterator[tuple[Where, object, object]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from _changes((*where, key), before.get(key, _ABSENT), after.get(key, _ABSENT))
    elif isinstance(before, list) and isinstance(after, list):
        for index in range(max(len(before), len(after))):
            old, new = (one[index] if index < len(one) else _ABSENT for one in (before, after))
            yield from _changes((*where, index), old, new)
    elif before != after:
        yield where, before, after


def _shown(value: object) -> str:
    if value is _ABSENT or value is None:
        return "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value) or "''"


def _printable(line: str) -> str:
    """The kept plan may hold anything that a writer of the lake chose."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)
