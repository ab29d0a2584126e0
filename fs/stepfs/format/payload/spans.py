"""The spans of a planned payload: which tokens of which record stand where. `producer/PAYLOADS.md` has their columns.

`.safetensors` and `.pt` hold them as an array, `.tar` as a list beside each micro-batch; `.npy` and `.bin` have no room.
"""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.format.payload.arrays import ArrayInfo, ByTorch, PayloadArrays, read_arrays
from stepfs.format.payload.excerpt import Excerpt, UnreadablePayloadError
from stepfs.format.payload.schema import format_of
from stepfs.format.payload.values import LOCAL_HEADER_BYTES, decode, member_values_at, values_bytes

COLUMNS: Final = ("micro", "start", "tokens", "source", "epoch", "file", "offset", "first")
_MICRO, _START, _TOKENS, _SOURCE = range(4)

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of one payload, and its tokens."""

    sources: tuple[str, ...]
    table: Integers  # [spans, COLUMNS]
    ids: NDArray[Any]  # integers [micro, tokens]

    def ids_of(self, span: int) -> Integers:
        micro, start, tokens = self.table[span, : _TOKENS + 1].tolist()
        return self.ids[micro, start : start + tokens].astype(np.int64)


class NoSpansError(UnreadablePayloadError):
    """The payload has no spans: no plan wrote it, or its format has no room for them."""


def read_spans(ext: str, payload: bytes | memoryview, by_torch: ByTorch) -> Spans:
    """`NoSpansError` for a payload without spans, `UnreadablePayloadError` for a damaged one."""
    name = format_of(ext)
    if name not in {"safetensors", "pt", "tar"}:
        raise NoSpansError(f"is a {name} file, which has no room for spans")
    try:
        found = _of_tar(payload) if name == "tar" else _of_arrays(name, payload, by_torch)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, tarfile.TarError) as error:
        if isinstance(error, UnreadablePayloadError):
            raise
        raise UnreadablePayloadError(f"has spans that are none ({error!r})") from error
    _check(found)
    return found


def _of_arrays(name: str, payload: bytes | memoryview, by_torch: ByTorch) -> Spans:
    header = read_arrays(name, Excerpt.of(payload), by_torch)
    arrays = {array.name: array for array in header.arrays}
    if not {"spans", "input_ids"} <= set(arrays):
        raise NoSpansError("has no spans")
    table = _values(payload, arrays["spans"]).astype(np.int64)
    return Spans(_sources(header), table, _values(payload, arrays["input_ids"]))


def _sources(header: PayloadArrays) -> tuple[str, ...]:
    names: Any = header.facts.get("sources", [])
    return tuple(map(str, json.loads(names) if isinstance(names, str) else names))


def _values(payload: bytes | memoryview, array: ArrayInfo) -> NDArray[Any]:
    size = values_bytes(array, array.nbytes)
    if size is None or not array.dtype.startswith(("int", "uint")):
        raise UnreadablePayloadError(f"has {array.name!r} of dtype {array.dtype}, which are no spans or tokens")
    at = array.offset
    if array.member_at is not None:
        local = payload[array.member_at : array.member_at + LOCAL_HEADER_BYTES]
        at += array.member_at + member_values_at(bytes(local))
    return decode(array.dtype, bytes(payload[at : at + size])).reshape(array.shape)


def _of_tar(payload: bytes | memoryview) -> Spans:
    """A sample per micro-batch, in order."""
    rows: list[list[int]] = []
    ids: list[NDArray[Any]] = []
    sources: tuple[str, ...] = ()
    with tarfile.open(fileobj=io.BytesIO(payload), mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None:
                continue
            if member.name.endswith(".input_ids.npy"):
                data = file.read()
                [array] = read_arrays("npy", Excerpt.of(data)).arrays
                ids.append(_values(data, array))
            elif member.name.endswith(".json"):
                facts = json.load(file)
                sources = tuple(map(str, facts["sources"]))
                rows += [[len(ids) - 1, *map(int, span)] for span in facts["spans"]]
    if not sources:
        raise NoSpansError("has no spans")
    return Spans(sources, np.array(rows, np.int64).reshape(-1, len(COLUMNS)), np.stack(ids))


def _check(spans: Spans) -> None:
    table, ids = spans.table, spans.ids
    fits = table.ndim == 2 and table.shape[1] == len(COLUMNS) and ids.ndim == 2 and table.min(initial=0) >= 0
    if fits and len(table):
        micro, start, tokens, source = table[:, : _SOURCE + 1].T
        fits = bool(
            micro.max() < len(ids)
            and tokens.max() <= ids.shape[1]
            and (start <= ids.shape[1] - tokens).all()
            and source.max() < len(spans.sources)
        )
    if not fits:
        raise UnreadablePayloadError("has spans that do not fit its tokens")
