"""Columns of a plan: arrays that samples carry beside their tokens, the prices of their rows, and images as their origin."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np

from stepfs_producer.plan.cost import TOKENS
from stepfs_producer.plan.file.part import Part
from stepfs_producer.plan.file.problems import Problem, nearest
from stepfs_producer.plan.file.scalars import Parsed, choice, shown, text, whole
from stepfs_producer.plan.rules import Packing

DTYPES: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
WITHOUT_COLUMNS: Final = (".npy", ".bin")
_COLUMNS_MAX: Final = 16
_DIMENSIONS_MAX: Final = 8
_ROW_BYTES_MAX: Final = 16 << 20
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,23}", re.ASCII)
_TAKEN: Final = frozenset({
    "input_ids", "labels", "position_ids", "doc_ids", "cu_seqlens", "cu_seqlens_offsets", "spans", "sources",
    "sequence_length", "micro", "tokens", "boundaries", "source", "record", "first",
})  # fmt: skip  # names of a file's arrays, facts and dimensions, and of the columns for cost functions


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


_LIST: Final = {"type": "array", "items": {"type": ["integer", "string"]}}
NAMES: Final = Parsed(_names, {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})


class Column(Part):
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


class Images(Part):
    """Encoded images in the records' fields, decoded before the transform gets them."""

    short: ClassVar[str | None] = "fields"
    example: ClassVar[str] = "{fields: [jpg, png]}"

    fields: Annotated[tuple[str, ...], NAMES]
    """Fields that hold a JPEG or PNG, or a list of them, where a record has the field."""
    patch: Annotated[int, whole(1, 64)] = 14
    """Pixels of a patch's side: it becomes a row of patch × patch × 3 bytes."""
    merge: Annotated[int, whole(1, 8)] = 2
    """Sides of an image are multiples of so many patches, which a model then merges."""
    patches_max: Annotated[int, whole(1, 1 << 16)] = 4096
    """Larger images are made smaller, to at most so many patches."""

    def own_problems(self) -> list[Problem]:
        if self.patches_max >= self.merge**2:
            return []
        return [Problem(("patches_max",), f"less than the {self.merge**2} patches that are merged")]


def problems_of_columns(columns: Mapping[str, Column], ext: str) -> Iterator[Problem]:
    """Problems of `output.columns`, below `output`."""
    where = "columns"
    if columns and ext in WITHOUT_COLUMNS:
        what = f"{ext} files have no room for columns; choose .safetensors, .pt or .tar"
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
    for name in () if cost is None else cost.columns:
        if name not in columns:
            yield Problem(("cost", "columns", name), _unknown("column", name, columns), of_key=True)
    for index, name in enumerate(() if balance is None else balance.loads):
        if name not in {TOKENS, *columns}:
            yield Problem(("balance", "loads", index), _unknown("load", name, (TOKENS, *columns)))


def _unknown(what: str, name: str, known: Sequence[str] | Mapping[str, Column]) -> str:
    advice = nearest(name, known) or f"; declare it: output: {{columns: {{{name}: {Column.example}}}}}"
    return f"unknown {what} {name!r}{advice}"
