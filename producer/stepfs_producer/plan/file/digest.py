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

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.mesh import Mesh
from stepfs_producer.plan.holds import IDS_ALONE
from stepfs_producer.plan.model import Plan, with_ids_alone
from stepfs_producer.plan.part import Part, keys_of
from stepfs_producer.plan.resolve import resolve
from stepfs_producer.plan.sources import SourceFiles
from stepfs_producer.plan.values import NONE, Shard, Where, decimal_text, path_text

Normalised = dict[str, Any]  # JSON
_ABSENT: Final = object()


def normalised(plan: Plan) -> Normalised:
    """Every setting by its YAML name, as text, whole numbers, lists and mappings."""
    found: Normalised = _plain(resolve(plan))
    del found["defaults"]  # every source has them
    return found


def _plain(value: object) -> Any:
    """A value of a plan as JSON. Parts have the names of YAML, and nothing for what is not given."""
    match value:
        case Part():
            found = {}
            for key in keys_of(type(value)):
                one = getattr(value, key.name)
                if (one not in (None, {}, ()) and not key.later) or key.required or one != key.default():
                    # Text has no null, and YAML would read the word.
                    found[key.spelled] = NONE if one is None else _plain(one)
            if {"tokens_field", "chat", "pair"} & found.keys() and "text_field" in found:
                del found["text_field"]  # one or the other
            if "label" in found:
                del found["chosen"], found["rejected"]
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
        settings = json.loads(text)
        if is_of_text := settings["output"]["ext"] == IDS_ALONE:
            del settings["output"]["ext"]
        plan = Plan.read(settings)
        return with_ids_alone(plan) if is_of_text else plan
    except (ValueError, RecursionError, LookupError, TypeError) as error:
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
    if where == ("exclude",):  # thousands, perhaps
        then, now = (
            {json.dumps(one) for one in (known if isinstance(known, list) else ())} for known in (before, after)
        )
        if then != now:
            yield where, f"{len(then)} documents", f"{len(now)}, {len(now - then)} of them new"
    elif isinstance(before, dict) and isinstance(after, dict):
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
