"""The changes between two plans, for a person to accept before a run is fenced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from stepfs.errors import RefusedError
from stepfs_producer.plan.file.digest import Normalised
from stepfs_producer.plan.file.problems import Where, path_text

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
