"""The text of a plan with all defaults filled in, its digest, and the changes between two plans.

Two plan files that mean the same have the same text. The text is itself a plan, so a kept one can be read again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, ClassVar, Final

from pydantic import ValidationError

from stepfs.errors import CorruptError, RefusedError
from stepfs_producer.plan.file.parts import (
    AnySource,
    Cost,
    Mix,
    OnError,
    Parquet,
    Shuffle,
    Source,
    Stage,
    Tokenizer,
    Until,
)
from stepfs_producer.plan.file.schema import Plan
from stepfs_producer.plan.file.values import NONE, Where, decimal_text, path_text

Normalised = dict[str, Any]  # JSON


def with_defaults(plan: Plan) -> dict[str, AnySource]:
    """The sources in order of names, each with the settings of `defaults` that it does not have itself."""
    common = {name: getattr(plan.defaults, name) for name in type(plan.defaults).model_fields}
    return {
        name: source.model_copy(
            update={key: value for key, value in common.items() if key not in source.model_fields_set}
        )
        for name, source in sorted(plan.sources.items())
    }


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
    """The entries of the mix; without any, all sources weigh the same."""
    return plan.mix or (Mix(weights=dict.fromkeys(plan.sources, Fraction(1))),)


def micro_batch_tokens(plan: Plan) -> int:
    """Tokens of a micro-batch; by default a row of the longest stage."""
    return plan.output.micro_batch_tokens or max(stage.sequence_length for stage in stages_of(plan))


def normalised(plan: Plan) -> Normalised:
    """Every setting by its YAML name, as text, whole numbers, lists and mappings."""
    return {
        "version": plan.version,
        "seed": plan.seed,
        "output": _given(
            {
                "ext": plan.output.ext,
                "mesh": str(plan.output.mesh),
                "micro_batches": plan.output.micro_batches,
                "micro_batch_tokens": micro_batch_tokens(plan),
                # Unset by default: a key that came later must not change the digests of plans without it.
                "files": plan.output.files if plan.output.files != "ranks" else None,
                "labels": plan.output.labels,
                "columns": _columns(plan) or None,
            }
        ),
        "stages": [_stage(one) for one in stages_of(plan)],
        "tokenizer": _tokenizer(plan.tokenizer),
        "sources": {name: _source(source) for name, source in with_defaults(plan).items()},
        "mix": [_entry(entry) for entry in mix_of(plan)],
        "pack": {"method": str(plan.pack.method)},
        "cost": _cost(plan.cost),
        "balance": _given(
            {
                "method": str(plan.balance.method),
                "over": str(plan.balance.over),
                "loads": list(plan.balance.loads) or None,
            }
        ),
        "until": _until(plan.until),
    }


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


def _columns(plan: Plan) -> dict[str, Any]:
    return {
        name: _given(
            {
                "dtype": column.dtype,
                "shape": list(column.shape),
                "file": column.file if column.file != "rank" else None,
            }
        )
        for name, column in sorted(plan.output.columns.items())
    }


def _stage(stage: Stage) -> dict[str, Any]:
    lengths = {"lengths": stage.lengths} if stage.lengths else {}
    return {"from": stage.from_, "sequence_length": stage.sequence_length, **lengths}


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    return _given({name: getattr(tokenizer, name) for name in ("kind", "file", "eos", "bos", "pad")})


def _source(source: AnySource) -> dict[str, Any]:
    found: dict[str, Any] = {
        "format": source.format,
        "files": list(source.files),
        "shuffle": _shuffle(source.shuffle),
        "long": str(source.long),
        "epochs": NONE if source.epochs is None else decimal_text(source.epochs),
        "on_error": _on_error(source.on_error),
        "holdout": decimal_text(source.holdout),
        "endpoint_url": source.endpoint_url,
        "profile": source.profile,
        "shard": None if source.shard is None else "{}/{}".format(*source.shard),
        "transform": source.transform,
        "version": source.version,
    }
    for name in ("records", "text_field", "tokens_field", "mask_field", "labels_field"):
        if hasattr(source, name):
            found[name] = getattr(source, name)
    if found.get("tokens_field") is not None:
        del found["text_field"]  # one or the other
    if isinstance(source, Source):
        found["options"] = dict(source.options)
    if isinstance(source, Parquet | Source) and source.images is not None:
        found["images"] = source.images.model_dump(mode="json")
    return _given(found)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without unset keys: text has no null, and YAML would read the word."""
    return {name: value for name, value in settings.items() if value is not None}


def _shuffle(shuffle: Shuffle | None) -> object:
    return NONE if shuffle is None else {"block": shuffle.block}


def _on_error(on_error: OnError) -> object:
    if on_error.do == "stop":
        return {"do": "stop"}
    return {"do": on_error.do, "at_most": decimal_text(on_error.at_most), "in_a_row": on_error.in_a_row}


def _entry(entry: Mix) -> dict[str, Any]:
    weights = {name: decimal_text(entry.weights[name]) for name in sorted(entry.weights)}
    step = {"from": entry.from_ or 0} if entry.ramp_to is None else {"ramp_to": entry.ramp_to}
    return {**step, "weights": weights}


def _cost(cost: Cost) -> dict[str, Any]:
    if cost.call is not None:
        return {"call": cost.call}
    linear, quadratic = cost.coefficients
    return {"linear": linear, "quadratic": quadratic, **({"columns": cost.columns} if cost.columns else {})}


def _until(until: Until) -> dict[str, Any]:
    given: Mapping[str, object] = {
        "steps": until.steps,
        "tokens": until.tokens,
        "exhausted": None if until.exhausted is None else str(until.exhausted),
    }
    return {**_given(given), "last": until.last}


_ABSENT: Final = object()
_PLACES: Final = ("files", "endpoint_url", "profile")


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
        if not (where[0] == "sources" and where[2:3] and where[2] in _PLACES)
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
