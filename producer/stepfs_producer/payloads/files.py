"""A planned step with its tokens: the arrays, then the bytes of each file. PAYLOADS.md has the shapes."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import UsageError
from stepfs.payload import LAYOUT, SPAN_COLUMNS
from stepfs.torch import need_torch, torch_bytes
from stepfs_producer.payloads.step import COUNTS, NO_TOKEN, Columns, ColumnSpec, PayloadSpec, StepTask, columns_of
from stepfs_producer.plan.arrays import IGNORED, Ids, Integers
from stepfs_producer.plan.holds import Part, lack
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.spans import Span

NO_DOCUMENT: Final = -1


STACKED: Final = ("input_ids", "labels", "position_ids", "doc_ids")
TENSORS: Final = (*STACKED, "cu_seqlens", "cu_seqlens_offsets", "spans")
_COMPACT: Final = ("cu_seqlens", "cu_seqlens_offsets")  # of TENSORS: those that are written as they are
_WIDE: Final = frozenset({"input_ids", "labels"})  # torch's losses and most embeddings expect int64
_DTYPES: Final = {"b": "BOOL", "i": "I", "u": "U", "f": "F"}  # by kind, of numbers before their bits
_HEADER_ALIGNMENT: Final = 8

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RankArrays:
    """The arrays of one rank's file. `micro` micro-batches of `tokens` tokens, padding included."""

    input_ids: Ids  # [micro, tokens]; padding at the end of a row
    labels: Ids  # IGNORED where the loss does not look
    position_ids: Ids  # from 0 in each span; 0 in padding
    doc_ids: Ids  # the number of the span in its micro-batch; NO_DOCUMENT in padding
    cu_seqlens: Ids  # of all micro-batches, end to end: the boundaries of segments, 0 and `tokens` included
    cu_seqlens_offsets: Ids  # [micro + 1]: where each micro-batch begins in `cu_seqlens`
    spans: Integers  # [spans, columns of `stepfs.payload.COLUMNS`]
    sources: tuple[str, ...]
    sequence_length: int
    columns: Columns = ()  # of the spans
    is_masked: bool = False  # the loss may leave out tokens within a span of this step
    tags: tuple[str, ...] | None = None  # of the spans; None: the plan has none
    cu_seqlens_true: Ids | None = None  # as `cu_seqlens`, of segments without what rounds them up; None: none is


@dataclass(frozen=True, slots=True)
class _Rank:
    """The part of a task that is one rank's: rows of its table, and tokens of its columns."""

    task: StepTask
    spans: slice
    tokens: slice


def rank_arrays(task: StepTask, *, padding: int, labels_shifted: bool, align: int = 1) -> Iterator[RankArrays]:
    """The arrays of rank 0, 1, … of a step. `padding` is the id that fills up rows, and documents to multiples of `align`."""
    table = task.spans
    bounds = np.searchsorted(table[:, Span.RANK], np.arange(task.shape[0] + 1))
    assert (np.diff(table[:, Span.RANK]) >= 0).all(), "spans stand in reading order"
    begins = np.concatenate([[0], np.cumsum(table[:, Span.TOKENS])])
    assert begins[-1] == len(task.ids), "spans and ids fit"
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rank = _Rank(task, slice(first, last), slice(int(begins[first]), int(begins[last])))
        yield _arrays(rank, padding, labels_shifted=labels_shifted, align=align)


def _arrays(rank: _Rank, padding: int, *, labels_shifted: bool, align: int) -> RankArrays:
    task = rank.task
    _, micro, rows = task.shape
    width = rows * task.sequence_length
    table = task.spans[rank.spans]
    tokens = table[:, Span.TOKENS]
    starts = (table[:, Span.MICRO] * rows + table[:, Span.ROW]) * task.sequence_length + table[:, Span.COLUMN]
    assert ((table[:, Span.COLUMN] >= 0) & (table[:, Span.COLUMN] + tokens <= task.sequence_length)).all()
    assert (tokens > 0).all()
    ends = starts - (-tokens // align) * align
    assert (starts[1:] >= ends[:-1]).all(), "spans do not overlap"

    edges = np.arange(micro * rows + 1) * task.sequence_length
    bounds = np.unique(np.concatenate([starts, ends, edges]))
    segment, size = bounds[:-1], np.diff(bounds)
    filled = np.zeros(len(segment), np.int32)  # tokens of the span in each segment
    filled[np.searchsorted(segment, starts)] = tokens
    first_of_micro = np.searchsorted(bounds, np.arange(micro + 1) * width)

    position = np.arange(micro * width, dtype=np.int32) - np.repeat(segment.astype(np.int32), size)
    taken = position < np.repeat(filled, size)
    before = np.concatenate([[0], np.cumsum(filled > 0)])  # spans before each segment
    document = before[:-1] - np.repeat(before[first_of_micro[:-1]], np.diff(first_of_micro))
    shape = (micro, width)
    labels = _shifted(rank, tokens) if labels_shifted else _same(rank)
    return RankArrays(
        _placed(task.ids[rank.tokens], taken, padding).reshape(shape),
        _placed(labels, taken, IGNORED).reshape(shape),
        np.where(taken, position, 0).astype(np.int32, copy=False).reshape(shape),
        np.where(taken, np.repeat(document.astype(np.int32), size), np.int32(NO_DOCUMENT)).reshape(shape),
        *_cu_seqlens(bounds, first_of_micro),
        np.column_stack([table[:, Span.MICRO], starts % width, tokens, table[:, Span.SOURCE :]]),
        task.sources,
        task.sequence_length,
        tuple(column.part(rank.spans.start, rank.spans.stop) for column in task.columns),
        task.mask is not None,
        None if task.tags is None else _texts(task.tags.part(rank.spans.start, rank.spans.stop)),
        _cu_seqlens(np.concatenate([[0], np.cumsum(filled)]), first_of_micro)[0] if align > 1 else None,
    )


def _texts(tags: Ragged) -> tuple[str, ...]:
    return tuple(one.tobytes().decode() for one in tags)


def _placed(values: Ids, taken: NDArray[np.bool_], filler: int) -> Ids:
    """The spans' values at their places. Spans stand in reading order, so places are in order, too."""
    array = np.full(len(taken), filler, np.int32)
    array[taken] = values
    return array


def _same(rank: _Rank) -> Ids:
    labels = rank.task.ids[rank.tokens]
    if rank.task.mask is None:
        return labels
    return np.where(rank.task.mask[rank.tokens] != 0, labels, np.int32(IGNORED))


def _shifted(rank: _Rank, tokens: Integers) -> Ids:
    """Each token's successor in its document, IGNORED where there is none or the loss ignores it."""
    task = rank.task
    labels = np.full(rank.tokens.stop - rank.tokens.start, IGNORED, np.int32)
    own = _same(rank)
    labels[:-1] = own[1:]
    following = task.following[rank.spans]
    learned = following != NO_TOKEN
    if task.following_mask is not None:
        learned &= task.following_mask[rank.spans] != 0
    labels[np.cumsum(tokens) - 1] = np.where(learned, following, IGNORED)
    return labels


def _cu_seqlens(bounds: Integers, first_of_micro: Integers) -> tuple[Ids, Ids]:
    """A boundary between two micro-batches ends the one and begins the other: it stands in both, in each from 0 on."""
    micro = len(first_of_micro) - 1
    counts = np.diff(first_of_micro) + 1
    offsets = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(offsets[-1]) - np.repeat(np.arange(micro), counts)
    values = bounds[places] - np.repeat(bounds[first_of_micro[:-1]], counts)
    return values.astype(np.int32), offsets.astype(np.int32)


Encoder = Callable[[RankArrays, Sequence[ColumnSpec]], list[bytes]]


def construct(spec: PayloadSpec, task: StepTask) -> tuple[list[bytes], list[int]]:
    """The payload of each file, in the order of slices, and the number of spans (documents, or parts of them) in each.

    A file beside a rank's counts none. The same task gives the same bytes in every process. `UsageError` for an unknown
    extension.
    """
    encode = encoder_for(spec)
    if len(task.ids):
        assert 0 <= int(task.ids.min()) <= int(task.ids.max()) < spec.vocabulary
    if task.mask is not None and (what := lack(spec.ext, Part.LABELS)):
        raise UsageError(f"a transform leaves tokens out of the loss, and {what}")
    records = spec.records(task.planned, task.shape)
    if spec.of_micro_batch:
        task = task.by_micro_batch()
    if spec.columns and not task.columns:
        task = replace(task, columns=columns_of(spec.columns, [{}] * len(task.spans)))
    if spec.tagged and task.tags is None:  # all spans are of sources without
        task = replace(task, tags=Ragged.of_bytes([b""] * len(task.spans)))
    arrays = rank_arrays(task, padding=spec.padding, labels_shifted=spec.labels_shifted, align=spec.align)
    payloads = [payload for rank in arrays for payload in encode(rank, spec.columns)]
    return payloads, records


def encoder_for(spec: PayloadSpec) -> Encoder:
    """The encoder of an extension, with its dot. `UsageError` names those there are.

    It makes the files of a rank: its own, then those of columns that have one.
    """
    ext, vocabulary = spec.ext, spec.vocabulary
    tensors = partial(_compact, spec) if spec.compact else _full
    encoders: dict[str, Encoder] = {
        ".safetensors": partial(_of_tensors, _safetensors, tensors),
        ".npy": lambda rank, _: [_npy_bytes(np.stack([getattr(rank, name) for name in STACKED]))],
        ".pt": partial(_of_tensors, torch_bytes, tensors),
        ".tar": _webdataset,
        ".bin": lambda rank, _: [rank.input_ids.astype("<u2" if vocabulary <= 1 << 16 else "<u4").tobytes()],
    }
    if ext not in encoders:
        raise UsageError(f"plans do not make {ext} files; the extension is one of {' '.join(encoders)}")
    if ext == ".pt":
        need_torch("writing .pt files")
    return encoders[ext]


def _of_tensors(
    encode: Callable[[Tensors, Mapping[str, object]], bytes],
    tensors: Callable[[RankArrays], Tensors],
    rank: RankArrays,
    columns: Sequence[ColumnSpec],
) -> list[bytes]:
    facts = {
        "layout": LAYOUT,
        "sequence_length": rank.sequence_length,
        "sources": list(rank.sources),
        "span_columns": list(SPAN_COLUMNS[: rank.spans.shape[1]]),
    }
    beside = [encode(own, facts) for own in _own_files(rank.columns, columns)]
    own = facts if rank.tags is None else {**facts, "tags": list(rank.tags)}
    return [encode({**tensors(rank), **_inside(rank.columns, columns)}, own), *beside]


def _full(rank: RankArrays) -> Tensors:
    found: dict[str, NDArray[Any]] = {
        name: getattr(rank, name).astype("<i8" if name in _WIDE or name == "spans" else "<i4", copy=False)
        for name in TENSORS
    }
    return found | _true(rank)


def _true(rank: RankArrays) -> dict[str, NDArray[Any]]:
    return {} if rank.cu_seqlens_true is None else {"cu_seqlens_true": rank.cu_seqlens_true}


def _compact(spec: PayloadSpec, rank: RankArrays) -> Tensors:
    """The arrays that determine the others, which `stepfs.payload.expand` gives back."""
    starts, tokens = rank.spans[:, 1], rank.spans[:, 2]
    ids = next(kind for kind in ("<u1", "<u2", "<u4") if spec.vocabulary <= 1 << 8 * np.dtype(kind).itemsize)
    narrow = "<i4" if rank.spans.max(initial=0) <= np.iinfo(np.int32).max else "<i8"
    found: dict[str, NDArray[Any]] = {name: getattr(rank, name).astype("<i4", copy=False) for name in _COMPACT}
    found |= {"input_ids": rank.input_ids.astype(ids), "spans": rank.spans.astype(narrow)}
    if spec.labels_shifted:  # all others stand in `input_ids`
        found["last_labels"] = rank.labels[rank.spans[:, 0], starts + tokens - 1].astype("<i4")
    found |= _true(rank)
    if rank.is_masked:
        found["label_bits"] = np.packbits(rank.labels != IGNORED, axis=1, bitorder="little")
    return found


def _inside(given: Columns, columns: Sequence[ColumnSpec]) -> dict[str, NDArray[Any]]:
    """Arrays of the rank's file: all counts, and the rows of columns without a file."""
    found: dict[str, NDArray[Any]] = {}
    for column, rows in zip(columns, given, strict=True):
        found[column.name + COUNTS] = rows.lengths.astype("<i4")
        if not column.own_file:
            found[column.name] = column.column.none() if column.counted else rows.values
    return found


def _own_files(given: Columns, columns: Sequence[ColumnSpec]) -> list[dict[str, NDArray[Any]]]:
    """The array of each file beside it."""
    return [{column.name: rows.values} for column, rows in zip(columns, given, strict=True) if column.own_file]


def _safetensors(found: Tensors, facts: Mapping[str, object]) -> bytes:
    tensors = sorted(found.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": {name: json.dumps(fact) for name, fact in facts.items()}}
    end = 0
    for name, array in tensors:
        begin, end = end, end + array.nbytes
        bits = "" if array.dtype.kind == "b" else str(8 * array.itemsize)
        header[name] = {
            "dtype": _DTYPES[array.dtype.kind] + bits,
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(np.ascontiguousarray(array).data for _, array in tensors)]
    )


def _npy_bytes(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def _webdataset(arrays: RankArrays, columns: Sequence[ColumnSpec]) -> list[bytes]:
    """A sample per micro-batch, named for its first token, which no other sample of the lake has."""
    buffers = [io.BytesIO() for column in (None, *columns) if column is None or column.own_file]
    with ExitStack() as stack:
        archive, *beside = [
            stack.enter_context(tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT))
            for buffer in buffers
        ]
        for micro in range(len(arrays.input_ids)):
            mine = arrays.spans[:, 0] == micro
            spans = arrays.spans[mine][:, 1:].tolist()
            key = "{2:03d}-{3:03d}-{4:06d}-{5:012d}-{6:07d}".format(*spans[0]) if spans else f"padding-{micro:04d}"
            for name in STACKED:
                _add(archive, f"{key}.{name}.npy", _npy_bytes(getattr(arrays, name)[micro]))
            given = tuple(column.take(np.flatnonzero(mine)) for column in arrays.columns)
            beside_it = zip(beside, _own_files(given, columns), strict=True)
            for place, tensors in ((archive, _inside(given, columns)), *beside_it):
                for name, array in tensors.items():
                    _add(place, f"{key}.{name}.npy", _npy_bytes(array))
            columns_of = SPAN_COLUMNS[1 : arrays.spans.shape[1]]
            facts = {"layout": LAYOUT, "spans": spans, "span_columns": columns_of, "sources": arrays.sources}
            if arrays.tags is not None:
                facts["tags"] = [arrays.tags[span] for span in np.flatnonzero(mine).tolist()]
            _add(archive, f"{key}.json", json.dumps(facts).encode())
    return [buffer.getvalue() for buffer in buffers]


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # time 0, owner 0: the same arrays are the same bytes
    member.size = len(data)
    member.mode = 0o444
    archive.addfile(member, io.BytesIO(data))
