"""What a payload holds: its arrays, and the spans of one that a plan made (`producer/PAYLOADS.md` has their columns).

`expand` gives the full arrays of a file whose plan wrote compact ones.

Payloads come from any producer. So nothing of a file is executed, and a file that is none of its kind is one error.
"""

import io
import json
import math
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs._internal import compact_arrays
from stepfs.format.identity import HEAD_BYTES, payload_problem
from stepfs.torch import load

expand: Final = compact_arrays.expand
COLUMNS: Final = ("micro", "start", "tokens", "source", "epoch", "file", "offset", "first")
PAIR: Final = len(COLUMNS)  # of plans with pairs, the side of one: 0 of none, 1 chosen, 2 rejected; so are labels
LAYOUT: Final = 1  # of plans' files: what arrays and columns mean; those that are added behind them change no number
SPAN_COLUMNS: Final = (*COLUMNS, "pair")
_MICRO, _START, _TOKENS, _SOURCE = range(4)
_WITH_SPANS: Final = {".safetensors", ".pt", ".pth", ".tar"}
_ONLY_ARRAY: Final = "array"  # the name of an array that has none: of an .npy file, or a bare tensor
_SAFETENSORS: Final = {
    "BOOL": "bool",
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
}
_DEPTH_MAX: Final = 16  # of containers in a `.pt`
# What numpy, json and tarfile raise for bytes that are no file of theirs.
_DAMAGED: Final = (
    ArithmeticError, EOFError, KeyError, MemoryError, RecursionError, TypeError, ValueError, tarfile.TarError,
)  # fmt: skip

Buffer = bytes | bytearray | memoryview
Integers = NDArray[np.int64]


class UnreadablePayloadError(ValueError):
    """The payload is not of its kind; the message says why."""


class NoSpansError(UnreadablePayloadError):
    """The payload has no spans: no plan wrote it, or its format has no room for them."""


@dataclass(frozen=True, slots=True)
class Array:
    """One array. `values` None: not read, or of a dtype that numpy does not have."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    values: NDArray[Any] | None

    def document(self, count: int) -> dict[str, Any]:
        """The array for JSON, with its first values; nan, inf and complex numbers are text."""
        first = None
        if self.values is not None and self.values.dtype.kind in "biufc":
            each = self.values.reshape(-1)[:count].tolist()
            first = [value if isinstance(value, int) or _is_finite(value) else str(value) for value in each]
        facts = {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "bytes": self.nbytes}
        return {**facts, "values": first}


@dataclass(frozen=True, slots=True)
class Contents:
    """The arrays of a payload. `facts`: plain values beside them."""

    arrays: tuple[Array, ...]
    facts: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of one payload, and its tokens."""

    sources: tuple[str, ...]
    table: Integers  # [spans, COLUMNS and, where the plan has pairs, PAIR]
    ids: NDArray[Any]  # integers [micro, tokens]
    tags: tuple[str, ...] = ()  # of each span, "" where its source has none; (): no source of the plan has

    def ids_of(self, span: int) -> Integers:
        micro, start, tokens = self.table[span, : _TOKENS + 1].tolist()
        return self.ids[micro, start : start + tokens].astype(np.int64)


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def last_suffix(ext: str) -> str:
    """What tells the kind of a file: `.npy` of `.rows.npy`."""
    return "." + ext.rpartition(".")[2].lower()


def read_arrays(ext: str, payload: Buffer, *, pt_values: bool = True) -> Contents | None:
    """The arrays of a `.safetensors`, `.npy` or `.pt` payload; None for other kinds.

    `pt_values=False` reads no value of a `.pt`, which can claim any size. `UnreadablePayloadError` for other bytes,
    `MissingPackageError` for a `.pt` without torch.
    """
    kind = last_suffix(ext)
    if kind not in {".safetensors", ".npy", ".pt", ".pth"}:
        return None
    problem = payload_problem(ext, bytes(payload[:HEAD_BYTES]), len(payload))
    if problem is not None:
        raise UnreadablePayloadError(problem)
    try:
        if kind == ".safetensors":
            return _of_safetensors(memoryview(payload))
        if kind == ".npy":
            return Contents((_of_npy(payload),), {})
        return _of_pt(load(payload, "cpu" if pt_values else "meta"))
    except _DAMAGED as error:
        reason = " ".join(str(error).split())[:160]
        raise UnreadablePayloadError(
            f"is no {kind} file that can be read ({type(error).__name__}: {reason})"
        ) from error


def read_spans(ext: str, payload: Buffer) -> Spans:
    """`NoSpansError` for a payload without spans, `UnreadablePayloadError` for a damaged one."""
    kind = last_suffix(ext)
    if kind not in _WITH_SPANS:
        raise NoSpansError(f"is a {kind[1:]} file, which has no room for spans")
    try:
        found = _spans_of_tar(payload) if kind == ".tar" else _spans_of_arrays(ext, payload)
    except UnreadablePayloadError:
        raise
    except _DAMAGED as error:
        raise UnreadablePayloadError(f"has spans that are none ({error!r})") from error
    _check(found)
    return found


def _of_safetensors(payload: memoryview) -> Contents:
    begin = 8 + int.from_bytes(payload[:8], "little")
    header = json.loads(bytes(payload[8:begin]))
    facts = header.pop("__metadata__", {})
    if not isinstance(facts, dict):
        raise TypeError("__metadata__ is no map")
    arrays = []
    for name, fields in header.items():
        first, end = fields["data_offsets"]
        dtype, shape = _SAFETENSORS.get(fields["dtype"], str(fields["dtype"])[:40]), tuple(map(int, fields["shape"]))
        data = payload[begin + first : begin + end]
        if min(first, end - first, *shape, 0) < 0 or len(data) != end - first:
            raise ValueError(f"{name}: its values are not in the file")
        arrays.append(Array(name, dtype, shape, len(data), _values(dtype, shape, data)))
    return Contents(tuple(arrays), facts)


def _values(dtype: str, shape: tuple[int, ...], data: memoryview) -> NDArray[Any] | None:
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    known = dtype in _SAFETENSORS.values()
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape) if known else None


def _of_npy(payload: Buffer) -> Array:
    try:
        values = np.load(io.BytesIO(payload), allow_pickle=False)
    except Exception as error:  # numpy raises whatever a hostile header leads its parser to
        raise ValueError(str(error) or type(error).__name__) from error
    native = values.dtype.isnative and values.dtype.kind in "biufc"
    return Array(_ONLY_ARRAY, values.dtype.name if native else str(values.dtype), values.shape, values.nbytes, values)


def _of_pt(value: object) -> Contents:
    arrays: list[Array] = []
    facts: dict[str, object] = {}
    for name, found in _leaves("", value, 0):
        if isinstance(found, Array):
            arrays.append(found)
        else:
            facts[name] = found
    return Contents(tuple(arrays), facts)


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, object]]:
    if hasattr(value, "is_meta"):  # a tensor
        dtype = str(value.dtype).removeprefix("torch.")
        known = dtype in _SAFETENSORS.values() and dtype != "bfloat16" and not value.is_meta and not value.is_sparse
        values = value.detach().resolve_conj().resolve_neg().numpy() if known else None
        yield name, Array(name or _ONLY_ARRAY, dtype, tuple(value.shape), value.nbytes, values)
        return
    is_list = isinstance(value, list | tuple) and any(hasattr(each, "is_meta") for each in value)
    if depth < _DEPTH_MAX and (is_list or isinstance(value, Mapping)):
        items = enumerate(value) if is_list else value.items()
        for key, each in items:
            yield from _leaves(f"{name}.{key}" if name else str(key), each, depth + 1)
        return
    yield name or "value", f"{len(value)} bytes" if isinstance(value, bytes) else value


def _spans_of_arrays(ext: str, payload: Buffer) -> Spans:
    contents = read_arrays(ext, payload)
    assert contents is not None
    arrays = {array.name: array for array in contents.arrays}
    if not {"spans", "input_ids"} <= set(arrays):
        raise NoSpansError("has no spans")
    facts: dict[str, Any] = {
        name: json.loads(fact) if isinstance(fact, str) else fact
        for name, fact in contents.facts.items()
        if name in {"layout", "sources", "span_columns", "tags"}
    }
    table = _known(_integers(arrays["spans"]).astype(np.int64), facts, SPAN_COLUMNS)
    sources, tags = (tuple(map(str, facts.get(name, []))) for name in ("sources", "tags"))
    return Spans(sources, table, _integers(arrays["input_ids"]), tags)


def _known(table: Integers, facts: Mapping[str, Any], columns: tuple[str, ...]) -> Integers:
    """The columns of spans that are known here, whatever a later version has put behind them."""
    if int(facts.get("layout", LAYOUT)) > LAYOUT:
        raise UnreadablePayloadError(f"is of layout {facts['layout']}, and this stepfs reads {LAYOUT}; upgrade stepfs")
    if table.ndim != 2:
        raise ValueError(f"{table.ndim} dimensions")
    named = list(facts.get("span_columns", columns[: table.shape[1]]))
    return table[:, [named.index(name) for name in columns if name in named]]


def _integers(array: Array) -> NDArray[Any]:
    if array.values is None or array.values.dtype.kind not in "iu":
        raise UnreadablePayloadError(f"has {array.name!r} of dtype {array.dtype}, which are no spans or tokens")
    return array.values


def _spans_of_tar(payload: Buffer) -> Spans:
    """A sample per micro-batch, in order."""
    rows: list[list[int]] = []
    ids: list[NDArray[Any]] = []
    facts: dict[str, Any] = {}
    tags: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(payload), mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None:
                continue
            if member.name.endswith(".input_ids.npy"):
                ids.append(_integers(_of_npy(file.read())))
            elif member.name.endswith(".json"):
                facts = json.load(file)
                tags += map(str, facts.get("tags", []))
                if facts["spans"]:
                    known = _known(np.array(facts["spans"], np.int64), facts, SPAN_COLUMNS[1:])
                    rows += [[len(ids) - 1, *span] for span in known.tolist()]
    if not facts.get("sources"):
        raise NoSpansError("has no spans")
    table = np.array(rows, np.int64).reshape(-1, len(rows[0]) if rows else len(COLUMNS))
    return Spans(tuple(map(str, facts["sources"])), table, np.stack(ids), tuple(tags))


def _check(spans: Spans) -> None:
    table, ids = spans.table, spans.ids
    fits = (
        table.ndim == 2 and table.shape[1] in (len(COLUMNS), PAIR + 1) and ids.ndim == 2 and table.min(initial=0) >= 0
    )
    if fits and len(table):
        micro, start, tokens, source = table[:, : _SOURCE + 1].T
        fits = bool(
            micro.max() < len(ids)
            and tokens.max() <= ids.shape[1]
            and (start <= ids.shape[1] - tokens).all()
            and source.max() < len(spans.sources)
        )
    if not fits or len(spans.tags) not in (0, len(table)):
        raise UnreadablePayloadError("has spans that do not fit its tokens")
