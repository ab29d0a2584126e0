"""The schemas of `fs/schemas`, and whether a real document is one of them.

A schema admits unknown fields, because documents grow. A test that compares with it must not: a field that a document
has and its schema lacks is a field without a description.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator

FOLDER: Final = Path(__file__).parents[2] / "fs/schemas"
NAMES: Final = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "face")


@cache
def schema(name: str) -> dict[str, Any]:
    """The schema as it is written."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


@cache
def _strict(name: str) -> Draft202012Validator:
    return Draft202012Validator(_closed(schema(name)))


def _closed(part: Any) -> Any:
    """The schema without room for unknown fields."""
    if isinstance(part, list):
        return [_closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    closed = {key: _closed(value) for key, value in part.items()}
    if isinstance(part.get("properties"), dict) and "additionalProperties" not in part:
        closed["additionalProperties"] = False
    return closed


def check(name: str, document: object) -> None:
    """Fail unless the document has every field that its schema requires, and none that it does not know."""
    errors = [f"{error.json_path}: {error.message}" for error in _strict(name).iter_errors(document)]
    assert not errors, f"fs/schemas/{name}.json: " + "; ".join(errors[:5])


def undescribed(name: str) -> set[str]:
    """Every name of a field in the schema, at any depth, that has no description there."""
    return set(_undescribed(schema(name)))


def _undescribed(part: Any) -> set[str]:
    if isinstance(part, list):
        return set().union(*map(_undescribed, part)) if part else set()
    if not isinstance(part, dict):
        return set()
    properties = part.get("properties")
    own = properties if isinstance(properties, dict) else {}
    return {key for key, field in own.items() if not field.get("description")}.union(*map(_undescribed, part.values()))
