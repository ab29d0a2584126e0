"""Compact arrays of a plan's file, and the full ones that they determine. `stepfs.payload.expand` is the public name."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs._internal import image_patches

IGNORED: Final = -100  # a label at which the loss does not look
_NO_DOCUMENT: Final = -1  # of padding
_COMPACT: Final = {"input_ids", "cu_seqlens", "cu_seqlens_offsets", "spans"}  # without labels, which full files have
_MICRO, _START, _TOKENS = range(3)  # columns of spans


def is_compact(batch: object) -> bool:
    """Whether this is a decoded file of a plan with `output: {arrays: compact}`."""
    return isinstance(batch, Mapping) and batch.keys() >= _COMPACT and "labels" not in batch


def expand(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The full arrays of a decoded file of compact ones (`producer/PAYLOADS.md`): those that the same plan writes without
    `arrays: compact`, equal in each byte.

    Takes numpy arrays or torch tensors, and gives the same. Other values stay, and so do all of a file that is full. Images
    that a file holds encoded become their patches.
    """
    if image_patches.holds_encoded(batch):
        batch = image_patches.without_encoded(batch)
        if hasattr(batch["input_ids"], "numpy"):
            batch |= {image_patches.PIXELS: _tensor(batch[image_patches.PIXELS])}
    if not is_compact(batch):
        return dict(batch)
    tensor = hasattr(batch["input_ids"], "numpy")
    kept = {name: value for name, value in batch.items() if name not in _COMPACT | {"last_labels", "label_bits"}}
    full = _expanded({name: value.numpy() if tensor else value for name, value in batch.items() if name not in kept})
    return ({name: _tensor(value) for name, value in full.items()} if tensor else full) | kept


def _tensor(value: NDArray[Any]) -> Any:
    from torch import from_numpy  # noqa: PLC0415 - heavy, and here already

    return from_numpy(value)


def _expanded(compact: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    ids, spans = compact["input_ids"], compact["spans"].astype(np.int64)
    micro, width = ids.shape
    begins = spans[:, _MICRO] * width + spans[:, _START]
    ends = begins + spans[:, _TOKENS]
    # Gap, span, gap, span, …, gap: most gaps are empty.
    edges = np.concatenate([[0], np.stack([begins, ends], 1).ravel(), [ids.size]])
    sizes = np.diff(edges)
    first = np.searchsorted(spans[:, _MICRO], np.arange(micro))  # span of each micro-batch
    documents = np.full(len(sizes), _NO_DOCUMENT, np.int32)
    documents[1::2] = np.arange(len(spans)) - first[spans[:, _MICRO]]
    positions = np.arange(ids.size, dtype=np.int32)
    positions -= np.repeat(edges[:-1].astype(np.int32), sizes)
    last = compact.get("last_labels")
    labels = np.empty(ids.size, np.int64)
    if last is None:
        labels[:] = ids.ravel()
    else:
        labels[:-1] = ids.ravel()[1:]
        labels[ends - 1] = last
    for gap in np.flatnonzero(sizes[::2]).tolist():
        padding = slice(edges[2 * gap], edges[2 * gap + 1])
        positions[padding], labels[padding] = 0, IGNORED
    bits = compact.get("label_bits")
    if bits is not None:
        learned = np.unpackbits(bits, axis=1, count=width, bitorder="little")
        labels[learned.ravel() == 0] = IGNORED
    return {
        "input_ids": ids.astype(np.int64),
        "labels": labels.reshape(ids.shape),
        "position_ids": positions.reshape(ids.shape),
        "doc_ids": np.repeat(documents, sizes).reshape(ids.shape),
        "cu_seqlens": compact["cu_seqlens"],
        "cu_seqlens_offsets": compact["cu_seqlens_offsets"],
        "spans": spans,
    }
