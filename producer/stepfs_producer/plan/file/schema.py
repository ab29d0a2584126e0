"""The JSON schema of plan files, for editors, and the help of each key: its docstring in the source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from enum import StrEnum
from fractions import Fraction
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.part import Before, Part, keys_of
from stepfs_producer.plan.values import Parsed

Schema = dict[str, Any]
Schemas = dict[str, Schema]


def json_schema() -> Schema:
    """Of a plan, with its parts below `$defs`."""
    parts: Schemas = {}
    plan = _part(Plan, parts)
    return {"$defs": dict(sorted(parts.items())), **plan}


def help_of(kind: type[Part]) -> Mapping[str, str]:
    """What the keys of a part mean, by their names in Python."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if issubclass(one, Part) and one is not Part:
            found |= _docstrings(one)
            found |= one.said
    return found


def _docstrings(kind: type[Part]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except OSError:  # a program without its source
        return {}
    assert isinstance(tree, ast.ClassDef)
    return {
        key.target.id: inspect.cleandoc(said.value.value)
        for key, said in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant) and isinstance(said.value.value, str)
    }


def _part(kind: type[Part], parts: Schemas) -> Schema:
    properties, said = {}, help_of(kind)
    for key in keys_of(kind):
        found = dict(_of(key.hint, parts))
        if key.field.default is not MISSING:
            found["default"] = _plain(key.field.default)
        if key.name in said:
            found["description"] = said[key.name]
        properties[key.spelled] = found
    required = [key.spelled for key in keys_of(kind) if key.required]
    return {
        "additionalProperties": False,
        "description": inspect.getdoc(kind),
        "properties": properties,
        **({"required": required} if required else {}),
        "title": kind.__name__,
        "type": "object",
    }


def _of(hint: Any, parts: Schemas) -> Schema:
    """The schema of what may be written for a type."""
    if hint is NoneType:
        return {"type": "null"}
    if isinstance(hint, type) and issubclass(hint, Part):
        return _named(hint, parts)
    return _SCHEMAS[get_origin(hint)](parts, *get_args(hint))


def _named(kind: type[Part], parts: Schemas) -> Schema:
    name = kind.__name__
    if name not in parts:
        parts[name] = {}
        parts[name] = _with_word(kind, _part(kind, parts))
    return {"$ref": f"#/$defs/{name}"}


def _marked(parts: Schemas, hint: Any, *marks: object) -> Schema:
    for mark in marks:
        if isinstance(mark, Parsed):
            return dict(mark.schema)
        if isinstance(mark, Before):
            return _of(mark.written, parts)
    return _of(hint, parts)


def _either(parts: Schemas, *hints: Any) -> Schema:
    every = [_of(one, parts) for one in hints]
    return {"anyOf": [each for one in every for each in (one["anyOf"] if one.keys() == {"anyOf"} else [one])]}


def _word(_parts: Schemas, word: str) -> Schema:
    return {"const": word, "type": "string"}


def _mapping(parts: Schemas, _name: Any, hint: Any) -> Schema:
    return {"additionalProperties": True if hint is Any else _of(hint, parts), "type": "object"}


def _sequence(parts: Schemas, hint: Any, _any_number: Any) -> Schema:
    return {"items": _of(hint, parts), "type": "array"}


def _with_word(kind: type[Part], part: Schema) -> Schema:
    """The part, or the word that stands for it."""
    if kind.short is None:
        return part
    word = {key: value for key, value in part["properties"][kind.short].items() if key != "default"}
    return {"anyOf": [part, word]}


def _plain(value: object) -> Any:
    match value:
        case Part():
            return {key.spelled: _plain(getattr(value, key.name)) for key in keys_of(type(value))}
        case tuple():
            return [_plain(one) for one in value]
        case Fraction() | StrEnum():
            return str(value)
        case _:
            return value


_SCHEMAS: Final[Mapping[Any, Callable[..., Schema]]] = {
    Annotated: _marked, Union: _either, UnionType: _either, Literal: _word, dict: _mapping, tuple: _sequence,
}  # fmt: skip
