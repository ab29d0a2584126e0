"""Whether a payload keeps its lake's promise: the schema if there is one, else the signature of its extension.

`init --check-payload` compares first bytes (`payload_kind`). A schema is the stronger form: it names arrays, their dtypes
and shapes. Producers check every payload that they append, `verify --content` checks every slice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from stepfs.format.payload.arrays import (
    ArrayInfo,
    ByTorch,
    array_bytes,
    raw_array,
    read_arrays,
    without_torch,
)
from stepfs.format.payload.excerpt import HEAD_BYTES_MAX, TAIL_BYTES_MAX, Excerpt, UnreadablePayloadError
from stepfs.format.payload.schema import ArraySpec, PayloadSchema, array_text
from stepfs.format.payload_kind import HEAD_BYTES, payload_problem


@dataclass(frozen=True, slots=True)
class PayloadCheck:
    """The demands on a slice of a lake: a file of `ext`, and, if `schema` is given, with its arrays."""

    ext: str
    schema: PayloadSchema | None = None
    by_torch: ByTorch = without_torch
    files: tuple[str, ...] = ("",)  # of the lake's grid

    def of_slice(self, index: int) -> PayloadCheck:
        """The demands on one slice, which is one of these files: of all alike, unless arrays name theirs."""
        arrays = {} if self.schema is None else self.schema.arrays or {}
        if self.schema is None or not any(spec.file for spec in arrays.values()):
            return self
        file = self.files[index % len(self.files)]
        mine = {name: spec for name, spec in arrays.items() if spec.file == file}
        return replace(self, schema=replace(self.schema, arrays=mine))

    @property
    def head_bytes(self) -> int:
        """How much of a slice's beginning `problem` looks at."""
        return HEAD_BYTES_MAX if self._has_arrays else HEAD_BYTES

    @property
    def tail_bytes(self) -> int:
        """How much of a slice's end `problem` looks at."""
        return TAIL_BYTES_MAX if self._has_arrays else 0

    @property
    def _has_arrays(self) -> bool:
        return self.schema is not None and self.schema.arrays is not None

    def problem(self, excerpt: Excerpt) -> str | None:
        """The fault of a slice, in words that follow its name; None if there is none."""
        if self.schema is not None and self.schema.arrays is not None:
            return _arrays_problem(self.schema, excerpt, self.by_torch)
        return payload_problem(self.ext, bytes(excerpt.head[:HEAD_BYTES]), excerpt.length)


def payload_arrays(schema: PayloadSchema, excerpt: Excerpt, by_torch: ByTorch) -> tuple[ArrayInfo, ...]:
    """The arrays of a payload of this schema's format. `UnreadablePayloadError` if it has another."""
    if schema.format == "bin" and schema.arrays:
        [(name, spec)] = schema.arrays.items()
        return (raw_array(name, spec.dtype, spec.shape, excerpt.length),)
    return read_arrays(schema.format, excerpt, by_torch).arrays


def _arrays_problem(schema: PayloadSchema, excerpt: Excerpt, by_torch: ByTorch) -> str | None:
    assert schema.arrays is not None
    try:
        arrays = payload_arrays(schema, excerpt, by_torch)
    except UnreadablePayloadError as error:
        return str(error)
    found = {array.name: array for array in arrays}
    if len(found) < len(arrays):
        [(twice, _)] = Counter(array.name for array in arrays).most_common(1)
        return f"has two arrays {twice[:80]!r}; give each a name of its own"
    sizes: dict[str, tuple[int, str]] = {}  # of named dimensions: size, and the array that has it
    for name, spec in schema.arrays.items():
        array = found.get(name)
        if array is None:
            others = ", ".join(map(repr, list(found)[:8])) or "none"
            return f"has no array {name!r}, the lake's schema says {spec}; its arrays: {others}"
        problem = _array_problem(array, spec, sizes)
        if problem is not None:
            return problem
    more = next((array for name, array in found.items() if name not in schema.arrays), None)
    if more is not None:
        return f"has an array {more.name[:80]!r}, {array_text(more.dtype, more.shape)}, that the lake's schema does not name"
    return None


def _array_problem(array: ArrayInfo, spec: ArraySpec, sizes: dict[str, tuple[int, str]]) -> str | None:
    said = f"has {array.name!r} as {array_text(array.dtype, array.shape)}, the lake's schema says {spec}"
    if array.dtype != spec.dtype or len(array.shape) != len(spec.shape):
        return said
    for size, wanted in zip(array.shape, spec.shape, strict=True):
        if isinstance(wanted, int) and size != wanted:
            return said
        if isinstance(wanted, str):
            known, where = sizes.setdefault(wanted, (size, array.name))
            if size != known:
                return f"{said}, and {wanted} is {known} in {where!r}"
    if array_bytes(array.dtype, array.shape) != array.nbytes:
        return f"{said}, and {array.nbytes} bytes are not that"
    return None
