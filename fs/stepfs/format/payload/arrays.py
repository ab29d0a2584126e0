"""The arrays of a payload, from its header alone: name, dtype, shape, and where the values are.

Nothing is executed and no library of the format is needed. Everything is bounded by what an `Excerpt` holds, because
payloads come from any producer and `stepfs verify --content` and `stepfs show` look at other people's lakes.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from stepfs.format.ids import INTEGER_MAX
from stepfs.format.payload.excerpt import Excerpt, UnreadablePayloadError
from stepfs.format.payload.schema import DIMENSIONS_MAX, DTYPE_BYTES, ONLY_ARRAY, array_text
from stepfs.format.payload_kind import HEAD_BYTES, payload_problem

_SAFETENSORS: Final = MappingProxyType(
    {
        "BOOL": "bool",
        **{
            f"{kind[0].upper()}{bits}": f"{kind}{bits}"
            for kind in ("int", "uint")
            for bits in (8, 16, 32, 64)
        },
        **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "C64": "complex64",
    }
)
FORMATS: Final = ("safetensors", "npy", "pt")  # those with a table of their arrays
_NPY_KINDS: Final = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
_NPY_HEADER_BYTES_MAX: Final = 10_000  # numpy's own limit for untrusted files
_DTYPE_CHARACTERS_MAX: Final = 40
_LENGTH_BYTES: Final = 8  # in front of a safetensors header
_DESCR: Final = re.compile(r"'descr': *'([<>|=]?)([A-Za-z]+)(\d*)'")
_SHAPE: Final = re.compile(r"'shape': *\(((?: *\d{1,16} *,)* *(?:\d{1,16})? *)\)")
_FORTRAN: Final = re.compile(r"'fortran_order': *(True|False)")


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """One array of a payload.

    `offset` and `nbytes` place its values in the payload, or in the member of a zip whose local header is at
    `member_at`. `strided`: they are not in row-major order.
    """

    name: str
    dtype: str  # of `DTYPE_BYTES`, or as the file spells one that stepfs does not know
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    strided: bool = False
    member_at: int | None = None


@dataclass(frozen=True, slots=True)
class PayloadArrays:
    """Everything that a header tells. `facts`: short values beside the arrays, for people."""

    arrays: tuple[ArrayInfo, ...]
    facts: dict[str, object]


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of the values; None for an unknown dtype."""
    item = DTYPE_BYTES.get(dtype)
    return None if item is None else math.prod(shape) * item


def read_arrays(format_name: str, excerpt: Excerpt) -> PayloadArrays:
    """The arrays of a payload. `UnreadablePayloadError` if it is not of this format, or of one without a table."""
    begins_otherwise = payload_problem(f".{format_name}", bytes(excerpt.head[:HEAD_BYTES]), excerpt.length)
    if format_name == "safetensors" and excerpt.length > _LENGTH_BYTES:
        return _safetensors(excerpt)  # says more of what is wrong
    if begins_otherwise is not None:
        raise UnreadablePayloadError(begins_otherwise)
    if format_name == "npy":
        return PayloadArrays((_npy(excerpt),), {})
    if format_name == "pt":
        from stepfs.format.payload.torch_file import read_torch_file  # noqa: PLC0415  (zipfile, 10 ms, for this format alone)

        return read_torch_file(excerpt)
    raise UnreadablePayloadError(f"is a {format_name} file, whose contents stepfs does not know")


def raw_array(name: str, dtype: str, shape: tuple[int | str | None, ...], length: int) -> ArrayInfo:
    """The one array of bytes without a header, as a schema describes it. `UnreadablePayloadError` if the length does not fit."""
    row = math.prod(size for size in shape if isinstance(size, int)) * DTYPE_BYTES[dtype]
    is_open = any(not isinstance(size, int) for size in shape)
    if (length % row if is_open and row else length != row) or (is_open and not row):
        raise UnreadablePayloadError(
            f"has {length} bytes, the lake's schema says {name!r} is {array_text(dtype, shape)}"
        )
    sizes = tuple(size if isinstance(size, int) else length // row for size in shape)
    return ArrayInfo(name, dtype, sizes, 0, length)


def _safetensors(excerpt: Excerpt) -> PayloadArrays:
    size = int.from_bytes(excerpt.read(0, 8), "little")
    if size > excerpt.length - 8:
        raise UnreadablePayloadError(
            f"says a header of {size} bytes and is {excerpt.length} bytes long; it is damaged or no safetensors file"
        )
    try:
        header = json.loads(excerpt.read(8, size))
    except UnreadablePayloadError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadablePayloadError("has a header that is no JSON; it is no safetensors file") from error
    if not isinstance(header, dict):
        raise UnreadablePayloadError("has a header that is no map; it is no safetensors file")
    facts = header.pop("__metadata__", {})
    arrays = [_safetensor(name, body, 8 + size, excerpt.length) for name, body in header.items()]
    return PayloadArrays(tuple(arrays), facts if isinstance(facts, dict) else {})


def _safetensor(name: str, body: object, begin: int, length: int) -> ArrayInfo:
    if isinstance(body, dict):
        code, sizes, place = (
            body.get("dtype"),
            sizes_of(body.get("shape")),
            sizes_of(body.get("data_offsets")),
        )
        if isinstance(code, str) and sizes is not None and place is not None and len(place) == 2:
            first, end = place
            dtype = _SAFETENSORS.get(code) or code[:_DTYPE_CHARACTERS_MAX]
            expected = array_bytes(dtype, sizes)
            if first <= end <= length - begin and expected in {None, end - first}:
                return ArrayInfo(name, dtype, sizes, begin + first, end - first)
    raise UnreadablePayloadError(f"has an entry for {name[:80]!r} that is damaged")


def sizes_of(value: object) -> tuple[int, ...] | None:
    """A list of sizes that an array can have; None for anything else."""
    if not isinstance(value, list | tuple) or len(value) > DIMENSIONS_MAX:
        return None
    sizes = [n for n in value if isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= INTEGER_MAX]
    return tuple(sizes) if len(sizes) == len(value) else None


def _npy(excerpt: Excerpt) -> ArrayInfo:
    wide = excerpt.read(6, 1)[0] > 1
    begin = 12 if wide else 10
    size = int.from_bytes(excerpt.read(8, begin - 8), "little")
    if size > _NPY_HEADER_BYTES_MAX:
        raise UnreadablePayloadError(
            f"says a header of {size} bytes, more than the {_NPY_HEADER_BYTES_MAX} that numpy reads"
        )
    text = excerpt.read(begin, size).decode("latin-1")
    descr, shape, order = _DESCR.search(text), _SHAPE.search(text), _FORTRAN.search(text)
    if shape is None or order is None:
        raise UnreadablePayloadError("has no header of an npy file")
    sizes = tuple(int(part) for part in shape[1].split(",") if part.strip())
    dtype = "a structured dtype" if descr is None else _npy_dtype(*descr.groups())
    if dtype == "object":
        raise UnreadablePayloadError("is an array of Python objects, which only unpickling could read")
    values = excerpt.length - begin - size
    if sizes_of(sizes) is None or array_bytes(dtype, sizes) not in {None, values}:
        raise UnreadablePayloadError(f"is {dtype} {list(sizes)} and has {values} bytes of values")
    return ArrayInfo(
        ONLY_ARRAY, dtype, sizes, begin + size, values, strided=order[1] == "True" and len(sizes) > 1
    )


def _npy_dtype(order: str, kind: str, size: str) -> str:
    if kind == "O":
        return "object"
    if kind == "b" and size == "1":
        return "bool"
    known = _NPY_KINDS.get(kind)
    if known is None or not size:
        return f"{order}{kind}{size}"
    swapped = order == (">" if sys.byteorder == "little" else "<") and size != "1"
    return f"{'big-endian ' if swapped else ''}{known}{8 * int(size[:4])}"
