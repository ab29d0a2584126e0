"""A lake's payload schema: which arrays each slice holds, and which tokenizer made its ids.

    {"version": 1, "format": "safetensors",
     "arrays": {"input_ids": {"dtype": "int64", "shape": ["rows", 2048]}, "labels": {"dtype": "int64", "shape": ["rows", 2048]}},
     "tokenizer": {"kind": "bytes", "identity": "bytes"}}

It is JSON text, as users write it, inside the lake's identity (FORMAT.md). A dimension is a number, null (any), or a
name: any, but equal wherever the name stands in one payload. A payload has exactly the arrays of the schema. Without
`arrays` only the format is promised. With `"binding": false` nothing is: the schema only describes the payloads of the
producer that made the lake. An array with a `file` is in that file of the lake's grid, all others are in the rank's.

The text is parsed only where it is used, so a newer version still mounts, and a fork passes the text on unchanged.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stepfs.errors import CorruptError, NewerFormatError, StepfsError, UsageError
from stepfs.format.ids import INTEGER_MAX
from stepfs.format.payload.dtypes import DTYPE_BYTES, UNKNOWN_DTYPES

SCHEMA_VERSION: Final = 1
SCHEMA_BYTES_MAX: Final = 64 << 10
ARRAYS_MAX: Final = 256
DIMENSIONS_MAX: Final = 32
ONLY_ARRAY: Final = "array"  # the name of an array that has none: of an .npy file, or a bare tensor
_FORMATS: Final = {".pth": "pt"}  # others are called like their extension
_WITH_ARRAYS: Final = {"safetensors", "npy", "pt", "bin"}
_NAME_BYTES_MAX: Final = 256
_DIMENSION: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_TOKENIZER_KEYS_MAX: Final = 32

Dimension = int | str | None
Scalar = None | bool | int | str


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The schema's demands on one array."""

    dtype: str
    shape: tuple[Dimension, ...]
    file: str = ""  # of the lake's grid that holds it

    def document(self) -> dict[str, Any]:
        file = {"file": self.file} if self.file else {}
        return {"dtype": self.dtype, "shape": list(self.shape), **file}

    def __str__(self) -> str:
        return array_text(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class PayloadSchema:
    """A schema of this version. `arrays` None: only the format is known. `binding`: payloads are held against it."""

    format: str
    arrays: Mapping[str, ArraySpec] | None = None
    tokenizer: Mapping[str, Scalar] = field(default_factory=dict)
    binding: bool = True

    def document(self) -> dict[str, Any]:
        """As in JSON documents and in the lake."""
        found: dict[str, Any] = {"version": SCHEMA_VERSION, "format": self.format}
        if self.arrays is not None:
            found["arrays"] = {name: spec.document() for name, spec in self.arrays.items()}
        if self.tokenizer:
            found["tokenizer"] = dict(self.tokenizer)
        if not self.binding:
            found["binding"] = False
        return found

    def text(self) -> str:
        """The stored form."""
        return json.dumps(self.document(), ensure_ascii=False, separators=(",", ":"))


def array_text(dtype: str, shape: tuple[Dimension, ...]) -> str:
    """`int64 [rows, 2048]`."""
    return f"{dtype} [{', '.join('?' if size is None else str(size) for size in shape)}]"


def format_of(ext: str) -> str:
    """The payload format of files with this extension."""
    last = "." + ext.rpartition(".")[2].lower()
    return _FORMATS.get(last, last[1:])


def stored_schema(text: str, what: str) -> PayloadSchema:
    """The schema that a lake holds. Unknown keys are ignored: a later stepfs of the same version may add some.

    `CorruptError` for anything else that no stepfs writes, `NewerFormatError` for a newer version.
    """
    try:
        return _parsed(text, what, known_keys_only=False)
    except _MistakeError as error:
        raise CorruptError(f"{what}: {error}") from error


def given_schema(text: str, ext: str, what: str) -> PayloadSchema:
    """A schema that a user wrote, for a lake of `ext` files. `format` may be left out, so may `version`.

    `UsageError` names the fault; `NewerFormatError`: a newer stepfs is needed.
    """
    try:
        schema = _parsed(text, what, known_keys_only=True, format_default=format_of(ext))
    except _MistakeError as error:
        raise UsageError(f"{what}: {error}") from error
    if schema.format != format_of(ext):
        raise UsageError(f"{what}: says the format {schema.format!r}, and the lake's files are {ext}; make them agree")
    if (mistake := _unfit(schema)) is not None:
        raise UsageError(f"{what}: {mistake}")
    if len(schema.text().encode()) > SCHEMA_BYTES_MAX:
        raise UsageError(f"{what}: more than {SCHEMA_BYTES_MAX} bytes; name fewer arrays, or shorter")
    return schema


def _unfit(schema: PayloadSchema) -> str | None:
    """The reason why no payload fits. A stored schema is not held against it: its lake stays as it is."""
    for name, spec in (schema.arrays or {}).items():
        if spec.dtype in UNKNOWN_DTYPES.get(schema.format, ()):
            return f"{name}: {schema.format} files cannot hold {spec.dtype}; choose another dtype"
        if schema.format == "bin" and 0 in spec.shape and not all(isinstance(size, int) for size in spec.shape):
            return f"{name}: no payload tells the open dimension of {spec}, which has no values; remove the 0"
    return None


def schema_document(text: str | None) -> dict[str, Any] | None:
    """The schema of a lake for JSON documents; one that cannot be read says `problem` in place of its contents."""
    if text is None:
        return None
    try:
        return stored_schema(text, "payload_schema").document()
    except StepfsError as error:
        return {"problem": str(error)}


def schema_text(text: str) -> str:
    """The schema of a lake on one line, for people."""
    try:
        schema = stored_schema(text, "payload_schema")
    except StepfsError as error:
        return str(error)
    arrays = ", ".join(f"{name} {spec}" for name, spec in (schema.arrays or {}).items())
    tokenizer = schema.tokenizer.get("identity")
    return schema.format + (f": {arrays}" if arrays else "") + (f"; tokenizer {tokenizer}" if tokenizer else "")


class _MistakeError(ValueError):
    """The text is no schema; the message says why."""


def _parsed(text: str, what: str, *, known_keys_only: bool, format_default: str | None = None) -> PayloadSchema:
    if len(text.encode(errors="surrogatepass")) > SCHEMA_BYTES_MAX:
        raise _MistakeError(f"more than {SCHEMA_BYTES_MAX} bytes")
    body = _map(_json(text), "the schema")
    version = body.get("version", SCHEMA_VERSION if known_keys_only else None)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _MistakeError("version: a whole number from 1 on")
    if version > SCHEMA_VERSION:
        raise NewerFormatError(
            f"{what}: a payload schema of version {version}, this stepfs knows up to {SCHEMA_VERSION}; upgrade stepfs"
        )
    if known_keys_only:
        _refuse_unknown(body, {"version", "format", "arrays", "tokenizer", "binding"}, "the schema")
    name = body.get("format", format_default)
    if not isinstance(name, str) or not _is_name(name):
        raise _MistakeError("format: the kind of file, such as safetensors")
    arrays = None if body.get("arrays") is None else _arrays(body["arrays"], name, known_keys_only)
    binding = body.get("binding", True)
    if not isinstance(binding, bool):
        raise _MistakeError("binding: true or false")
    return PayloadSchema(name, arrays, _tokenizer(body.get("tokenizer")), binding)


def _arrays(value: object, format_name: str, known_keys_only: bool) -> dict[str, ArraySpec]:
    arrays = _map(value, "arrays")
    if format_name not in _WITH_ARRAYS:
        raise _MistakeError(f"arrays: nothing reads arrays out of {format_name} files; leave them out")
    if not 0 < len(arrays) <= ARRAYS_MAX:
        raise _MistakeError(f"arrays: {len(arrays)} of them; name 1 to {ARRAYS_MAX}")
    if format_name == "npy" and list(arrays) != [ONLY_ARRAY]:
        raise _MistakeError(f"arrays: an npy file holds one array without a name; call it {ONLY_ARRAY!r}")
    found = {name: _array(name, each, known_keys_only) for name, each in arrays.items()}
    if format_name == "bin":
        _check_raw(found)
    return found


def _array(name: str, value: object, known_keys_only: bool) -> ArraySpec:
    if not _is_name(name):
        raise _MistakeError(f"arrays: {name[:40]!r} is no name; use 1 to {_NAME_BYTES_MAX} printable bytes")
    body = _map(value, name)
    if known_keys_only:
        _refuse_unknown(body, {"dtype", "shape", "file"}, name)
    dtype, shape, file = body.get("dtype"), body.get("shape"), str(body.get("file", ""))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _MistakeError(f"{name}: dtype {_short(dtype)} is none of {' '.join(DTYPE_BYTES)}")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS_MAX:
        raise _MistakeError(f"{name}: shape {_short(shape)} is no list of at most {DIMENSIONS_MAX} dimensions")
    return ArraySpec(dtype, tuple(_dimension(name, size) for size in shape), file)


def _dimension(name: str, value: object) -> Dimension:
    if value is None or (isinstance(value, str) and _DIMENSION.fullmatch(value)):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INTEGER_MAX:
        return value
    raise _MistakeError(
        f"{name}: dimension {_short(value)}: a number from 0 on, null for any, or a name for any that is equal everywhere"
    )


def _check_raw(arrays: Mapping[str, ArraySpec]) -> None:
    """Bytes without a header are one array, of which the length tells at most one dimension."""
    (name, spec), *others = arrays.items()
    if others:
        raise _MistakeError(f"arrays: bin files have no header; only one array fits, not {len(arrays)}")
    if len([size for size in spec.shape if not isinstance(size, int)]) > 1:
        raise _MistakeError(f"{name}: bin files have no header; leave at most one dimension open")


def _tokenizer(value: object) -> dict[str, Scalar]:
    if value is None:
        return {}
    body = _map(value, "tokenizer")
    if len(body) > _TOKENIZER_KEYS_MAX or not all(map(_is_fact, body, body.values())):
        raise _MistakeError("tokenizer: a map of text and whole numbers, such as kind, identity, vocabulary")
    return body


def _is_fact(name: str, value: object) -> bool:
    if isinstance(value, str):
        return _is_name(name) and value.isprintable()
    return _is_name(name) and (value is None or (isinstance(value, int) and abs(value) <= INTEGER_MAX))


def _refuse_unknown(body: Mapping[str, object], known: set[str], where: str) -> None:
    unknown = sorted(set(body) - known)
    if unknown:
        raise _MistakeError(f"{where}: {unknown[0][:40]!r} means nothing; known are {' '.join(sorted(known))}")


def _json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except _MistakeError:
        raise
    except RecursionError:
        raise _MistakeError("is nested too deeply") from None
    except ValueError as error:
        raise _MistakeError(f"is not JSON ({error})") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise _MistakeError(f"names {twice[:40]!r} twice")
    return found


def _refuse_constant(name: str) -> object:
    raise _MistakeError(f"holds {name}, which is not JSON")


def _map(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _MistakeError(f"{what}: {_short(value)} is no map")
    return value


def _is_name(name: str) -> bool:
    return 0 < len(name.encode(errors="surrogatepass")) <= _NAME_BYTES_MAX and name.isprintable()


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
