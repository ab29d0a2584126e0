"""A rank's arrays of a planned step → the bytes of its file, by the lake's extension. PAYLOADS.md has the shapes.

The bytes are a function of the arrays alone, since runs are compared by checksums. So `.safetensors` are written here:
the library keeps its metadata in a hash map, whose order differs from process to process.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import UsageError
from stepfs.torch_file.need import need_torch
from stepfs.torch_file.save import torch_bytes
from stepfs_producer.payloads.planned import RankArrays

STACKED: Final = ("input_ids", "labels", "position_ids", "doc_ids")
TENSORS: Final = (*STACKED, "cu_seqlens", "cu_seqlens_offsets", "spans")
_WIDE: Final = frozenset({"input_ids", "labels"})  # what torch's losses and most embeddings expect as int64
_DTYPES: Final = {np.dtype("<i8"): "I64", np.dtype("<i4"): "I32"}
_HEADER_ALIGNMENT: Final = 8

PlannedEncoder = Callable[[RankArrays], bytes]


def planned_encoder(ext: str) -> PlannedEncoder:
    """The encoder of an extension, with its dot. `UsageError` names the three there are."""
    encoders: dict[str, PlannedEncoder] = {".safetensors": _safetensors, ".npy": _npy, ".pt": _torch}
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
    buffer = io.BytesIO()
    np.save(
        buffer,
        np.stack([getattr(arrays, name) for name in STACKED]).astype("<i4", copy=False),
        allow_pickle=False,
    )
    return buffer.getvalue()
