"""A planned step → the arrays of each rank, as PAYLOADS.md promises them to trainers.

A rank's micro-batches are the leading dimension. A micro-batch is its rows end to end, [rows · sequence_length] tokens,
so that `cu_seqlens` can be given to variable-length attention as it is.

Each rank is laid out as *segments*: runs of tokens between two boundaries, of which there is one at each end of a
span and at each end of a row. A segment is a span or padding, and all arrays follow from segments by repetition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.payloads.columns import Columns
from stepfs_producer.payloads.step_task import NO_TOKEN, SPAN_COLUMNS, StepTask

IGNORED: Final = -100  # the label that torch's cross_entropy leaves out
NO_DOCUMENT: Final = -1
SPANS: Final = ("micro", "start", "tokens", "source", "epoch", "file", "offset", "first")

Integers = NDArray[np.int64]
Ids = NDArray[np.int32]

_RANK, _MICRO, _ROW, _COLUMN, _TOKENS = map(SPAN_COLUMNS.index, ("rank", "micro", "row", "column", "tokens"))
_ADDRESS: Final = SPAN_COLUMNS.index("source")


@dataclass(frozen=True, slots=True)
class RankArrays:
    """The arrays of one rank's file. `micro` micro-batches of `tokens` tokens, padding included."""

    input_ids: Ids  # [micro, tokens]; padding at the end of a row
    labels: Ids  # IGNORED where the loss does not look
    position_ids: Ids  # from 0 in each span; 0 in padding
    doc_ids: Ids  # the number of the span in its micro-batch; NO_DOCUMENT in padding
    cu_seqlens: Ids  # of all micro-batches, end to end: the boundaries of segments, 0 and `tokens` included
    cu_seqlens_offsets: Ids  # [micro + 1]: where each micro-batch begins in `cu_seqlens`
    spans: Integers  # [spans, columns of SPANS]
    sources: tuple[str, ...]
    sequence_length: int
    columns: Columns | None = None  # of the spans


@dataclass(frozen=True, slots=True)
class _Rank:
    """The part of a task that is one rank's: rows of its table, and tokens of its columns."""

    task: StepTask
    spans: slice
    tokens: slice


def rank_arrays(task: StepTask, *, padding: int, labels_shifted: bool) -> Iterator[RankArrays]:
    """The arrays of rank 0, 1, … of a step. `padding` is the id that fills up rows."""
    table = task.spans
    bounds = np.searchsorted(table[:, _RANK], np.arange(task.shape[0] + 1))
    assert (np.diff(table[:, _RANK]) >= 0).all(), "spans stand in reading order"
    begins = np.concatenate([[0], np.cumsum(table[:, _TOKENS])])
    assert begins[-1] == len(task.ids), "spans and ids fit"
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rank = _Rank(task, slice(first, last), slice(int(begins[first]), int(begins[last])))
        yield _arrays(rank, padding, labels_shifted=labels_shifted)


def _arrays(rank: _Rank, padding: int, *, labels_shifted: bool) -> RankArrays:
    task = rank.task
    _, micro, rows = task.shape
    width = rows * task.sequence_length
    table = task.spans[rank.spans]
    tokens = table[:, _TOKENS]
    starts = (table[:, _MICRO] * rows + table[:, _ROW]) * task.sequence_length + table[:, _COLUMN]
    assert ((table[:, _COLUMN] >= 0) & (table[:, _COLUMN] + tokens <= task.sequence_length)).all()
    assert (tokens > 0).all()
    assert (starts[1:] >= starts[:-1] + tokens[:-1]).all(), "spans do not overlap"

    edges = np.arange(micro * rows + 1) * task.sequence_length
    bounds = np.unique(np.concatenate([starts, starts + tokens, edges]))
    segment, size = bounds[:-1], np.diff(bounds)
    filled = np.zeros(len(segment), np.bool_)
    filled[np.searchsorted(segment, starts)] = True
    first_of_micro = np.searchsorted(bounds, np.arange(micro + 1) * width)

    taken = np.repeat(filled, size)
    position = np.arange(micro * width, dtype=np.int32) - np.repeat(segment.astype(np.int32), size)
    before = np.concatenate([[0], np.cumsum(filled)])  # spans before each segment
    document = before[:-1] - np.repeat(before[first_of_micro[:-1]], np.diff(first_of_micro))
    document[~filled] = NO_DOCUMENT
    shape = (micro, width)
    labels = _shifted(rank, tokens) if labels_shifted else _same(rank)
    return RankArrays(
        _placed(task.ids[rank.tokens], taken, padding).reshape(shape),
        _placed(labels, taken, IGNORED).reshape(shape),
        np.where(taken, position, 0).astype(np.int32, copy=False).reshape(shape),
        np.repeat(document.astype(np.int32), size).reshape(shape),
        *_cu_seqlens(bounds, first_of_micro, width),
        np.column_stack([table[:, _MICRO], starts % width, tokens, table[:, _ADDRESS:]]),
        task.sources,
        task.sequence_length,
        None if task.columns is None else task.columns.part(rank.spans.start, rank.spans.stop),
    )


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


def _cu_seqlens(bounds: Integers, first_of_micro: Integers, width: int) -> tuple[Ids, Ids]:
    """A boundary between two micro-batches ends the one and begins the other: it stands in both."""
    micro = len(first_of_micro) - 1
    counts = np.diff(first_of_micro) + 1
    offsets = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(offsets[-1]) - np.repeat(np.arange(micro), counts)
    values = bounds[places] - np.repeat(np.arange(micro) * width, counts)
    return values.astype(np.int32), offsets.astype(np.int32)
