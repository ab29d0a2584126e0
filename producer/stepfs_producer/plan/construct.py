"""A step's rows → what each slice reads: the data constructor's last decision, one contiguous block of rows each.

Slice s of a step gets rows [s * rows_per_slice, (s + 1) * rows_per_slice), so the slices of a step, read in order, are
the stream again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.pack import Rows, Span


@dataclass(frozen=True, slots=True)
class SliceBatch:
    """The batch of one data-parallel coordinate; arrays of shape [rows, seq_len]."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    doc_ids: NDArray[np.int32]
    spans: NDArray[np.int64]  # [parts, 6]: row, column, tokens, index into sources, byte offset in it, bytes
    sources: tuple[str, ...]  # documents that occur, in order of appearance
    stream: str  # which shard's rows these are
    first_row: int  # of all rows of that stream


def construct(rows: Rows, *, slices: int, stream: str, first_row: int) -> list[SliceBatch]:
    """Deal the rows of a step to its slices. `first_row` counts the stream's rows before this step."""
    count = len(rows.input_ids)
    assert count % slices == 0
    share = count // slices
    spans: list[list[Span]] = [[] for _ in range(slices)]
    for span in rows.spans:
        spans[span.row // share].append(span)
    batches = []
    for first, mine in zip(range(0, count, share), spans, strict=True):
        sources = tuple(dict.fromkeys(span.document for span in mine))
        number_of = {document: number for number, document in enumerate(sources)}
        table = [
            (span.row - first, span.column, span.tokens, number_of[span.document], span.offset, span.size)
            for span in mine
        ]
        part = slice(first, first + share)
        batches.append(
            SliceBatch(
                rows.input_ids[part],
                rows.labels[part],
                rows.position_ids[part],
                rows.doc_ids[part],
                np.array(table, np.int64).reshape(len(table), 6),
                sources,
                stream,
                first_row + first,
            )
        )
    return batches
