"""The arrays of a payload, from its header alone: name, dtype, shape, and where the values are.

Nothing is executed and no library of the format is needed, but for `.pt`, whose table torch unpickles. Everything is
bounded by the size of an `Excerpt`, because payloads come from any producer and `stepfs verify --content` and
`stepfs show` look at other people's lakes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from stepfs.format.ids import INTEGER_MAX
from stepfs.format.payload.dtypes import DTYPE_BYTES
from stepfs.format.payload.excerpt import Excerpt, UnreadablePayloadError
from stepfs.format.payload.npy_header import read_npy_header
from stepfs.format.payload.schema import DIMENSIONS_MAX, ONLY_ARRAY, array_text
from stepfs.format.payload_kind import HEAD_BYTES, payload_problem

_SAFETENSORS: Final = MappingProxyType(
    {
        "BOOL": "bool",
        **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
        **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "C64": "complex64",
    }
)
FORMATS: Final = ("safetensors", "npy", "pt")  # those with a table of their arrays
_DTYPE_CHARACTERS_MAX: Final = 40
_LENGTH_BYTES: Final = 8  # in front of a safetensors header


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """One array of a payload.

    `offset` and `nbytes` place its values in the payload, or in the member of a zip whose local header is at
    `member_at`. `strided`: the bytes there are not the values in row-major order, or not these values (a conjugated view).
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


ByTorch = Callable[[Excerpt], PayloadArrays]


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of the values; None for an unknown dtype."""
    item = DTYPE_BYTES.get(dtype)
    return None if item is None else math.prod(shape) * item


def without_torch(_excerpt: Excerpt) -> PayloadArrays:
    """The `ByTorch` of callers that never meet a `.pt` file."""
    raise AssertionError(".pt files are read by stepfs.torch")


def read_arrays(format_name: str, excerpt: Excerpt, by_torch: ByTorch = without_torch) -> PayloadArrays:
    """The arrays of a payload. `UnreadablePayloadError` if it is not of this format, or of one without a table.

    `by_torch` reads `.pt` files, whose table is a pickle.
    """
    begins_otherwise = payload_problem(f".{format_name}", bytes(excerpt.head[:HEAD_BYTES]), excerpt.length)
    if format_name == "safetensors" and excerpt.length > _LENGTH_BYTES:
        return _safetensors(excerpt)  # its errors are more precise
    if begins_otherwise is not None:
        raise UnreadablePayloadError(begins_otherwise)
    if format_name == "npy":
        return PayloadArrays((_npy(excerpt),), {})
    if format_name == "pt":
        return by_torch(excerpt)
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
    size = int.from_bytes(excerpt.read(0, _LENGTH_BYTES), "little")
    begin = _LENGTH_BYTES + size
    if begin > excerpt.length:
        raise UnreadablePayloadError(
            f"says a header of {size} bytes and is {excerpt.length} bytes long; it is damaged or no safetensors file"
        )
    header = _safetensors_header(excerpt.read(_LENGTH_BYTES, size))
    facts = header.pop("__metadata__", None)
    arrays = [_safetensor(name, body, begin, excerpt.length) for name, body in header.items()]
    _check_cover(arrays, begin, excerpt.length)
    return PayloadArrays(tuple(arrays), _metadata(facts))


def _safetensors_header(data: bytes) -> dict[str, object]:
    try:
        header = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_whole)
    except UnreadablePayloadError:
        raise
    except UnicodeDecodeError as error:
        raise UnreadablePayloadError("has a header that is not UTF-8; it is no safetensors file") from error
    except (ValueError, RecursionError) as error:
        raise UnreadablePayloadError("has a header that is no JSON; it is no safetensors file") from error
    if not isinstance(header, dict):
        raise UnreadablePayloadError("has a header that is no map; it is no safetensors file")
    return header


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnreadablePayloadError("has a header that says one name twice; it is damaged")
    return found


def _refuse_constant(name: str) -> object:
    raise UnreadablePayloadError(f"has a header with {name}, which is no JSON; it is no safetensors file")


def _whole(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)  # which the library takes for no whole number


def _metadata(facts: object) -> dict[str, object]:
    """A map of text, which the library demands."""
    if facts is None:
        return {}
    if not isinstance(facts, dict) or not all(map(_is_text, [*facts, *facts.values()])):
        raise UnreadablePayloadError("has a __metadata__ that is no map of text; it is no safetensors file")
    return facts


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _check_cover(arrays: list[ArrayInfo], begin: int, length: int) -> None:
    """The values lie side by side and are all that follows the header."""
    for array in sorted(arrays, key=lambda each: (each.offset, each.nbytes)):
        if array.offset != begin:
            raise UnreadablePayloadError(
                f"has values of {array.name[:80]!r} at byte {array.offset}, those before end at byte {begin}"
            )
        begin += array.nbytes
    if begin != length:
        raise UnreadablePayloadError(f"has {length - begin} bytes behind its last array")


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
    header = read_npy_header(excerpt)
    sizes, values = sizes_of(header.shape), excerpt.length - header.values_at
    if sizes is None or array_bytes(header.dtype, sizes) not in {None, values}:
        raise UnreadablePayloadError(f"is {header.dtype} {list(header.shape)} and has {values} bytes of values")
    strided = header.fortran_order and len(sizes) > 1
    return ArrayInfo(ONLY_ARRAY, header.dtype, sizes, header.values_at, values, strided)
