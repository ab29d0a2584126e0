"""A planned step with its tokens → the bytes of each rank's file, by the lake's extension. PAYLOADS.md has the shapes.

The bytes are a function of the arrays alone, since runs are compared by checksums. So `.safetensors` are written here:
the library keeps its metadata in a hash map, whose order differs from process to process.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import UsageError
from stepfs.torch.need import need_torch
from stepfs.torch.save import torch_bytes
from stepfs_producer.payloads.rank_arrays import RankArrays, rank_arrays
from stepfs_producer.payloads.step_task import PayloadSpec, StepTask

STACKED: Final = ("input_ids", "labels", "position_ids", "doc_ids")
TENSORS: Final = (*STACKED, "cu_seqlens", "cu_seqlens_offsets", "spans")
_WIDE: Final = frozenset({"input_ids", "labels"})  # torch's losses and most embeddings expect int64
_DTYPES: Final = {np.dtype("<i8"): "I64", np.dtype("<i4"): "I32"}
_HEADER_ALIGNMENT: Final = 8

Encoder = Callable[[RankArrays], bytes]


def construct(spec: PayloadSpec, task: StepTask) -> tuple[list[bytes], list[int]]:
    """The payload of each file, in the order of slices, and the number of spans (documents, or parts of them) in each.

    The same task gives the same bytes in every process. `UsageError` for an unknown extension.
    """
    encode = encoder_for(spec.ext, vocabulary=spec.vocabulary)
    if len(task.ids):
        assert 0 <= int(task.ids.min()) <= int(task.ids.max()) < spec.vocabulary
    if spec.of_micro_batch:
        task = task.by_micro_batch()
    arrays = rank_arrays(task, padding=spec.padding, labels_shifted=spec.labels_shifted)
    payloads = [encode(rank) for rank in arrays]
    records = np.bincount(task.spans[:, 0], minlength=task.shape[0])
    return payloads, records.tolist()


def encoder_for(ext: str, *, vocabulary: int) -> Encoder:
    """The encoder of an extension, with its dot, for ids below `vocabulary`. `UsageError` names those there are."""
    encoders: dict[str, Encoder] = {
        ".safetensors": _safetensors,
        ".npy": _npy,
        ".pt": _torch,
        ".tar": _webdataset,
        ".bin": partial(_ids_alone, dtype=np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")),
    }
    if ext not in encoders:
        raise UsageError(f"plans do not make {ext} files; the extension is one of {' '.join(encoders)}")
    if ext == ".pt":
        need_torch("writing .pt files")
    return encoders[ext]


def _tensors(arrays: RankArrays) -> dict[str, NDArray[Any]]:
    return {
        name: getattr(arrays, name).astype("<i8" if name in _WIDE or name == "spans" else "<i4", copy=False)
        for name in TENSORS
    }


def _torch(arrays: RankArrays) -> bytes:
    facts = {"sources": list(arrays.sources), "sequence_length": arrays.sequence_length}
    return torch_bytes(_tensors(arrays), facts)


def _safetensors(arrays: RankArrays) -> bytes:
    tensors = sorted(_tensors(arrays).items(), key=lambda item: (-item[1].itemsize, item[0]))
    facts = {"sequence_length": str(arrays.sequence_length), "sources": json.dumps(arrays.sources)}
    header: dict[str, object] = {"__metadata__": facts}
    end = 0
    for name, array in tensors:
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(np.ascontiguousarray(array).data for _, array in tensors)]
    )


def _npy(arrays: RankArrays) -> bytes:
    return _npy_bytes(np.stack([getattr(arrays, name) for name in STACKED]))


def _npy_bytes(array: NDArray[np.int32]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array.astype("<i4", copy=False), allow_pickle=False)
    return buffer.getvalue()


def _webdataset(arrays: RankArrays) -> bytes:
    """A sample per micro-batch, named for its first token, which no other sample of the lake has."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for micro in range(len(arrays.input_ids)):
            spans = arrays.spans[arrays.spans[:, 0] == micro][:, 1:].tolist()
            key = (
                "{2:03d}-{3:03d}-{4:06d}-{5:012d}-{6:07d}".format(*spans[0])
                if spans
                else f"padding-{micro:04d}"
            )
            for name in STACKED:
                _add(archive, f"{key}.{name}.npy", _npy_bytes(getattr(arrays, name)[micro]))
            facts = {"spans": spans, "sources": arrays.sources}
            _add(archive, f"{key}.json", json.dumps(facts).encode())
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # time 0, owner 0: the same arrays are the same bytes
    member.size = len(data)
    member.mode = 0o444
    archive.addfile(member, io.BytesIO(data))


def _ids_alone(arrays: RankArrays, *, dtype: np.dtype[np.unsignedinteger[Any]]) -> bytes:
    return arrays.input_ids.astype(dtype).tobytes()
