"""A slice's batch → the bytes of one rank file, by the lake's extension.

    .pt           as torch.save writes a dict: input_ids, labels (int64), position_ids, doc_ids (int32), each [rows, seq_len];
                  spans (int64 [parts, 6]) and sources (list of str). Loads with weights_only=True.
    .safetensors  the same tensors; sources as JSON in the metadata
    .npy          int32 [4, rows, seq_len]: input_ids, labels, position_ids, doc_ids
    .tar          WebDataset: per row one sample, key <shard>-of-<shards>-<row>, with input_ids.npy, labels.npy,
                  position_ids.npy, doc_ids.npy and .json {spans: [[column, tokens, source, offset, bytes] …]}
    .bin          input_ids alone, row after row, little-endian uint16 (uint32 for vocabularies above 65536)

`spans` say which source bytes stand where, so an audit needs nothing but the files; `.npy` and `.bin` have no place
for them, there the tokens themselves, undone in the producer's order, are the evidence.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import MissingPackageError, UsageError
from stepfs.torch_file.need import need_torch
from stepfs.torch_file.save import torch_bytes
from stepfs_producer.payloads.arrays import SliceBatch

Encoder = Callable[[SliceBatch], bytes]
_ARRAYS: Final = ("input_ids", "labels", "position_ids", "doc_ids")
_WIDE: Final = frozenset({"input_ids", "labels"})  # what torch's losses and most embeddings expect as int64


def encoder_for(ext: str, *, vocabulary: int) -> Encoder:
    """The encoder of an extension, with its dot. `UsageError` names the known ones."""
    encoders: dict[str, Encoder] = {
        ".pt": _torch,
        ".safetensors": _safetensors,
        ".npy": _npy,
        ".tar": _webdataset,
        ".bin": _Raw(np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")),
    }
    if ext not in encoders:
        raise UsageError(f"no text batches in {ext} files; the extension is one of {' '.join(encoders)}")
    if ext == ".pt":
        need_torch("writing .pt files")
    if ext == ".safetensors" and find_spec("safetensors") is None:
        raise MissingPackageError(
            f"{ext} files need the package safetensors, which is not installed: pip install 'stepfs[text]'"
        )
    return encoders[ext]


def _tensors(batch: SliceBatch) -> dict[str, NDArray[np.int64] | NDArray[np.int32]]:
    tensors: dict[str, NDArray[np.int64] | NDArray[np.int32]] = {}
    for name in _ARRAYS:
        array: NDArray[np.int32] = getattr(batch, name)
        tensors[name] = array.astype(np.int64) if name in _WIDE else array
    tensors["spans"] = batch.spans
    return tensors


def _torch(batch: SliceBatch) -> bytes:
    return torch_bytes(_tensors(batch), {"sources": list(batch.sources)})


def _safetensors(batch: SliceBatch) -> bytes:
    from safetensors.numpy import save  # noqa: PLC0415

    tensors = {name: np.ascontiguousarray(array) for name, array in _tensors(batch).items()}
    data: bytes = save(tensors, metadata={"sources": json.dumps(batch.sources)})
    return data


def _npy(batch: SliceBatch) -> bytes:
    return _npy_bytes(np.stack([getattr(batch, name) for name in _ARRAYS]))


def _npy_bytes(array: NDArray[np.int32]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _webdataset(batch: SliceBatch) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for row in range(len(batch.input_ids)):
            key = f"{batch.stream}-{batch.first_row + row:012d}"
            for name in _ARRAYS:
                _add(archive, f"{key}.{name}.npy", _npy_bytes(getattr(batch, name)[row]))
            mine = batch.spans[batch.spans[:, 0] == row]
            spans = [
                [column, count, batch.sources[source], *where]
                for _, column, count, source, *where in mine.tolist()
            ]
            _add(archive, f"{key}.json", json.dumps({"spans": spans}).encode())
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # time 0, owner 0: the same batch is the same bytes
    member.size = len(data)
    member.mode = 0o444
    archive.addfile(member, io.BytesIO(data))


class _Raw:
    """Token ids and nothing else, as `np.memmap` readers want them."""

    def __init__(self, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._dtype = dtype

    def __call__(self, batch: SliceBatch) -> bytes:
        return batch.input_ids.astype(self._dtype).tobytes()
