"""A decoded file of several micro-batches → each of them, as the file of that micro-batch alone would be decoded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Final

from stepfs.errors import WrongTypeError

_STACKED: Final = frozenset({"input_ids", "labels", "position_ids", "doc_ids"})
_OFFSETS: Final = "cu_seqlens_offsets"
_COUNTS: Final = "_counts"  # behind a column's name: its rows per span


def holds_micro_batches(batch: object) -> bool:
    """Whether this is a decoded `.pt` or `.safetensors` of a plan, which `micro_batches` takes."""
    return isinstance(batch, Mapping) and {"input_ids", "cu_seqlens", _OFFSETS, "spans"} <= batch.keys()


def micro_batches(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The micro-batches of a rank's file, decoded: each with `input_ids` [1, tokens] and `cu_seqlens` of its own.

    As a lake made with `output: {files: micro_batches}` holds them (producer/PAYLOADS.md). The arrays of tokens are views.
    Takes torch tensors or numpy arrays; values of other names are in each. `WrongTypeError` for a batch that no plan made.
    """
    if not holds_micro_batches(batch):
        raise WrongTypeError(
            f"a {type(batch).__name__} without {_OFFSETS} and spans is no decoded .pt or .safetensors of a plan;"
            " for other files make one of each micro-batch: output.files: micro_batches"
        )
    offsets = batch[_OFFSETS].tolist()
    numbers = batch["spans"][:, 0].tolist()  # in order
    return [_one(batch, micro, offsets, numbers) for micro in range(len(offsets) - 1)]


def _one(batch: Mapping[str, Any], micro: int, offsets: list[int], numbers: list[int]) -> dict[str, Any]:
    first, last = offsets[micro], offsets[micro + 1]
    begin, end = bisect_left(numbers, micro), bisect_left(numbers, micro + 1)
    spans = batch["spans"][begin:end] + 0  # a copy
    spans[:, 0] = 0
    own = {
        "cu_seqlens": batch["cu_seqlens"][first:last],
        _OFFSETS: batch[_OFFSETS][micro : micro + 2] - first,
        "spans": spans,
    }
    own |= {name: batch[name][micro : micro + 1] for name in _STACKED & batch.keys()}
    for name, counts in batch.items():
        if name.endswith(_COUNTS):
            own[name] = counts[begin:end]
            rows = slice(int(counts[:begin].sum()), int(counts[:end].sum()))
            own |= {column: batch[column][rows] for column in {name.removesuffix(_COUNTS)} & batch.keys()}
    return {name: own.get(name, value) for name, value in batch.items()}
