"""A step's rows → the batch of each slice: the data constructor's last decision, one contiguous block of rows each.

Slice s of a step gets rows [s * rows_per_slice, (s + 1) * rows_per_slice), so the slices of a step, read in order, are
the stream again.
"""

from __future__ import annotations

import numpy as np

from stepfs_producer.payloads.arrays import SliceBatch
from stepfs_producer.text.pack import Rows, Span


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
