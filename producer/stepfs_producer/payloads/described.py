"""The files that `encode` writes, as a lake's payload schema: recorded when a run creates the lake.

A plan's numbers of micro-batches and tokens may change at a step, so those dimensions have names. The rows of
`stepfs-produce text` never change, so they are numbers. An empty step shows whether another lake promises other files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from stepfs.format.payload.schema import ONLY_ARRAY, ArraySpec, Dimension, PayloadSchema, Scalar, format_of
from stepfs_producer.payloads.columns import COUNTS, ColumnSpec
from stepfs_producer.payloads.encode import construct
from stepfs_producer.payloads.rank_arrays import SPANS
from stepfs_producer.payloads.step_task import SPAN_COLUMNS, PayloadSpec, StepTask

_STACKED: Final = 4  # arrays in an .npy file
_SHORT_VOCABULARY: Final = 1 << 16


def planned_schema(
    ext: str,
    tokenizer: Mapping[str, Scalar],
    *,
    vocabulary: int,
    shape: tuple[Dimension, Dimension] = ("micro", "tokens"),
    columns: Sequence[ColumnSpec] = (),
) -> PayloadSchema:
    """Of the files of a plan. `shape`: micro-batches in a file, and tokens of each; numbers where they never change."""
    if ext == ".bin":  # its length tells one dimension
        known = all(isinstance(size, int) for size in shape)
        dtype = "uint16" if vocabulary <= _SHORT_VOCABULARY else "uint32"
        return PayloadSchema("bin", {"input_ids": ArraySpec(dtype, shape if known else ("tokens",))}, tokenizer)
    arrays: dict[str, ArraySpec] | None = None
    if ext == ".npy":
        arrays = {ONLY_ARRAY: ArraySpec("int32", (_STACKED, *shape))}
    elif ext in {".pt", ".safetensors"}:
        arrays = {
            **dict.fromkeys(("input_ids", "labels"), ArraySpec("int64", shape)),
            **dict.fromkeys(("position_ids", "doc_ids"), ArraySpec("int32", shape)),
            "cu_seqlens": ArraySpec("int32", ("boundaries",)),
            "cu_seqlens_offsets": ArraySpec("int32", (None,)),
            "spans": ArraySpec("int64", ("spans", len(SPANS))),
        }
        for column in columns:
            rows: tuple[Dimension, ...] = (column.name, *column.shape)
            arrays[column.name] = ArraySpec(column.dtype, rows, column.name if column.own_file else "")
            arrays[column.name + COUNTS] = ArraySpec("int32", ("spans",))
    return PayloadSchema(format_of(ext), arrays, tokenizer)


def empty_payloads(spec: PayloadSpec, shape: tuple[int, int]) -> list[bytes]:
    """The files of the first rank in a step without a document. `shape`: micro-batches, and tokens of each.

    Their arrays are those of every step, but for dimensions that no plan fixes."""
    micro, tokens = shape
    spans, ids = np.zeros((0, len(SPAN_COLUMNS)), np.int64), np.zeros(0, np.int32)
    shape_of_step = (1, 1 if spec.of_micro_batch else micro, 1)
    return construct(spec, StepTask(shape_of_step, tokens, (), spans, ids, ids, None, None))[0]
