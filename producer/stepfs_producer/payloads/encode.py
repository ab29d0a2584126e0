"""A planned step with its tokens → the bytes of each rank's file, by the lake's extension. PAYLOADS.md has the shapes.

The bytes are a function of the arrays alone, since runs are compared by checksums. So `.safetensors` are written here:
the library keeps its metadata in a hash map, whose order differs from process to process.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import UsageError
from stepfs.torch import need_torch, torch_bytes
from stepfs_producer.payloads.columns import COUNTS, Columns, ColumnSpec
from stepfs_producer.payloads.rank_arrays import RankArrays, rank_arrays
from stepfs_producer.payloads.step_task import PayloadSpec, StepTask

STACKED: Final = ("input_ids", "labels", "position_ids", "doc_ids")
TENSORS: Final = (*STACKED, "cu_seqlens", "cu_seqlens_offsets", "spans")
_WIDE: Final = frozenset({"input_ids", "labels"})  # torch's losses and most embeddings expect int64
_DTYPES: Final = {"b": "BOOL", "i": "I", "u": "U", "f": "F"}  # by kind, of numbers before their bits
_HEADER_ALIGNMENT: Final = 8

Tensors = Mapping[str, NDArray[Any]]
Encoder = Callable[[RankArrays, Sequence[ColumnSpec]], list[bytes]]


def construct(spec: PayloadSpec, task: StepTask) -> tuple[list[bytes], list[int]]:
    """The payload of each file, in the order of slices, and the number of spans (documents, or parts of them) in each.

    A file beside a rank's counts none. The same task gives the same bytes in every process. `UsageError` for an unknown
    extension.
    """
    encode = encoder_for(spec.ext, vocabulary=spec.vocabulary)
    if len(task.ids):
        assert 0 <= int(task.ids.min()) <= int(task.ids.max()) < spec.vocabulary
    records = spec.records(task.spans, task.shape)
    if spec.of_micro_batch:
        task = task.by_micro_batch()
    if spec.columns and task.columns is None:
        task = replace(task, columns=Columns.of_samples(spec.columns, [{}] * len(task.spans)))
    arrays = rank_arrays(task, padding=spec.padding, labels_shifted=spec.labels_shifted)
    payloads = [payload for rank in arrays for payload in encode(rank, spec.columns)]
    return payloads, records


def encoder_for(ext: str, *, vocabulary: int) -> Encoder:
    """The encoder of an extension, with its dot, for ids below `vocabulary`. `UsageError` names those there are.

    It makes the files of a rank: its own, then those of columns that have one.
    """
    encoders: dict[str, Encoder] = {
        ".safetensors": partial(_of_tensors, _safetensors),
        ".npy": lambda rank, _: [_npy_bytes(np.stack([getattr(rank, name) for name in STACKED]))],
        ".pt": partial(_of_tensors, torch_bytes),
        ".tar": _webdataset,
        ".bin": lambda rank, _: [rank.input_ids.astype("<u2" if vocabulary <= 1 << 16 else "<u4").tobytes()],
    }
    if ext not in encoders:
        raise UsageError(f"plans do not make {ext} files; the extension is one of {' '.join(encoders)}")
    if ext == ".pt":
        need_torch("writing .pt files")
    return encoders[ext]


def _of_tensors(
    encode: Callable[[Tensors, Mapping[str, object]], bytes], rank: RankArrays, columns: Sequence[ColumnSpec]
) -> list[bytes]:
    facts = {"sources": list(rank.sources), "sequence_length": rank.sequence_length}
    tensors = {
        name: getattr(rank, name).astype("<i8" if name in _WIDE or name == "spans" else "<i4", copy=False)
        for name in TENSORS
    }
    beside = [encode(own, facts) for own in _own_files(rank.columns, columns)]
    return [encode({**tensors, **_inside(rank.columns, columns)}, facts), *beside]


def _inside(given: Columns | None, columns: Sequence[ColumnSpec]) -> dict[str, NDArray[Any]]:
    """Arrays of the rank's file: all counts, and the rows of columns without a file."""
    found: dict[str, NDArray[Any]] = {}
    if given is not None:
        for column, counts, rows in zip(columns, given.counts.T, given.rows, strict=True):
            found[column.name + COUNTS] = counts.astype("<i4")
            if not column.own_file:
                found[column.name] = rows
    return found


def _own_files(given: Columns | None, columns: Sequence[ColumnSpec]) -> list[dict[str, NDArray[Any]]]:
    """The array of each file beside it."""
    rows = () if given is None else given.rows
    return [{column.name: each} for column, each in zip(columns, rows, strict=True) if column.own_file]


def _safetensors(found: Tensors, facts: Mapping[str, object]) -> bytes:
    tensors = sorted(found.items(), key=lambda item: (-item[1].itemsize, item[0]))
    texts = {"sequence_length": str(facts["sequence_length"]), "sources": json.dumps(facts["sources"])}
    header: dict[str, object] = {"__metadata__": texts}
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
            given = None if arrays.columns is None else arrays.columns.kept(mine)
            beside_it = zip(beside, _own_files(given, columns), strict=True)
            for place, tensors in ((archive, _inside(given, columns)), *beside_it):
                for name, array in tensors.items():
                    _add(place, f"{key}.{name}.npy", _npy_bytes(array))
            facts = {"spans": spans, "sources": arrays.sources}
            _add(archive, f"{key}.json", json.dumps(facts).encode())
    return [buffer.getvalue() for buffer in buffers]


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # time 0, owner 0: the same arrays are the same bytes
    member.size = len(data)
    member.mode = 0o444
    archive.addfile(member, io.BytesIO(data))
