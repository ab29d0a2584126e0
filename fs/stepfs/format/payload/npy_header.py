"""The header of an `.npy` file: the literal of a dict, which says dtype, shape and order.

It must be what numpy reads: a version that numpy knows, and the text of one dict with exactly three keys. `literal_eval`
sees only text whose tokens such a dict can have: other Python text of 10 000 characters makes the parser print warnings.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from typing import Final

from stepfs.format.payload.dtypes import UNKNOWN_DTYPES
from stepfs.format.payload.excerpt import Excerpt, UnreadablePayloadError

_ENCODINGS: Final = {b"\x01\x00": "latin-1", b"\x02\x00": "latin-1", b"\x03\x00": "utf-8"}  # by version
_HEADER_BYTES_MAX: Final = 10_000  # numpy's own limit for untrusted files
_VERSION_AT: Final = 6
_LENGTH_AT: Final = 8
_DTYPE_CHARACTERS_MAX: Final = 40
_ESCAPE: Final = r"\\(?:[\\'\"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U000[0-9a-f]{5})"
_STRING: Final = rf"""'(?:[^'\\\n\r\0]|{_ESCAPE})*'|"(?:[^"\\\n\r\0]|{_ESCAPE})*\""""
# Possessive: a header that is none is not tried again in every other division into tokens.
_LITERAL: Final = re.compile(rf"(?:[ \n]|[{{}}\[\](),:]|True|False|\d{{1,16}}(?!\d)|{_STRING})*+")
_KEYS: Final = {"descr", "fortran_order", "shape"}
_KINDS: Final = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
_MOMENTS: Final = {"M": "datetime64", "m": "timedelta64"}
_DESCR: Final = re.compile(r"([<>|=]?)([A-Za-z])(\d{0,4})(\[[0-9A-Za-z/]{1,16}\])?")


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """`dtype` as in schemas, or as the file spells one that they do not know. The values begin at `values_at`."""

    dtype: str
    shape: tuple[object, ...]
    fortran_order: bool
    values_at: int


def read_npy_header(excerpt: Excerpt) -> NpyHeader:
    """The header; `UnreadablePayloadError` if numpy would not read it, or only by unpickling."""
    version = excerpt.read(_VERSION_AT, 4)[:2]  # and the least that a length takes
    encoding = _ENCODINGS.get(version)
    if encoding is None:
        raise UnreadablePayloadError(
            f"is an npy file of version {version[0]}.{version[1]}, numpy reads 1.0, 2.0 and 3.0"
        )
    begin = _LENGTH_AT + (2 if version[0] == 1 else 4)
    size = int.from_bytes(excerpt.read(_LENGTH_AT, begin - _LENGTH_AT), "little")
    if size > _HEADER_BYTES_MAX:
        raise UnreadablePayloadError(
            f"says a header of {size} bytes, more than the {_HEADER_BYTES_MAX} that numpy reads"
        )
    header = _literal(excerpt.read(begin, size), encoding)
    if not isinstance(header, dict) or header.keys() != _KEYS:
        raise UnreadablePayloadError(f"has no header of an npy file: a dict of {', '.join(sorted(_KEYS))}")
    shape, order = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not isinstance(order, bool):
        raise UnreadablePayloadError("has no header of an npy file: shape must be a tuple, fortran_order a bool")
    return NpyHeader(_dtype(header["descr"]), shape, order, begin + size)


def _literal(data: bytes, encoding: str) -> object:
    """The value of the text; None if it is no literal."""
    try:
        text = data.decode(encoding)
        return ast.literal_eval(text) if _LITERAL.fullmatch(text) else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _dtype(descr: object) -> str:
    if isinstance(descr, list | tuple):
        return "a structured dtype"
    if not isinstance(descr, str):
        raise UnreadablePayloadError("has no header of an npy file: descr must name a dtype")
    found = _DESCR.fullmatch(descr)
    if found is None:
        if descr in UNKNOWN_DTYPES["npy"]:
            raise UnreadablePayloadError(f"says the dtype {descr!r}, which numpy does not know")
        return descr[:_DTYPE_CHARACTERS_MAX]
    order, kind, size, unit = found.groups()
    if kind == "O":
        raise UnreadablePayloadError("is an array of Python objects, which only unpickling could read")
    swapped = order == (">" if sys.byteorder == "little" else "<") and size != "1"
    prefix = "big-endian " if swapped else ""
    if kind in _MOMENTS and size == "8":
        return f"{prefix}{_MOMENTS[kind]}{unit or ''}"
    if unit is not None:
        return descr
    if kind == "b" and size == "1":
        return "bool"
    return f"{prefix}{_KINDS[kind]}{8 * int(size)}" if kind in _KINDS and size else descr
