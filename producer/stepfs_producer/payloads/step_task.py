"""One planned step with the tokens it needs: everything that a constructor gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.payloads.columns import Columns, ColumnSpec

NO_TOKEN: Final = -1
SPAN_COLUMNS: Final = (
    "rank",
    "micro",
    "row",  # of its micro-batch
    "column",
    "tokens",
    "source",  # index into `sources`
    "epoch",
    "file",  # number in the source's listing
    "offset",  # of the record in its file: bytes, or rows
    "first",  # token of the record
)


@dataclass(frozen=True, slots=True)
class StepTask:
    """A step to be made into payloads, one per rank."""

    shape: tuple[int, int, int]  # ranks, micro-batches, rows of a micro-batch
    sequence_length: int
    sources: tuple[str, ...]
    spans: NDArray[np.int64]  # [spans, columns of SPAN_COLUMNS], in reading order
    ids: NDArray[np.int32]  # of all spans, end to end
    following: NDArray[np.int32]  # per span: its document's next token, or NO_TOKEN
    mask: NDArray[np.uint8] | None  # per id: 0 where the loss ignores it
    following_mask: NDArray[np.uint8] | None  # per span: the same of `following`
    columns: Columns | None = None  # of the spans; None: no row

    def by_micro_batch(self) -> Self:
        """The same step, of as many ranks as it has micro-batches, with one each."""
        ranks, micro, rows = self.shape
        spans = self.spans.copy()
        spans[:, 0] = spans[:, 0] * micro + spans[:, 1]
        spans[:, 1] = 0
        return replace(self, shape=(ranks * micro, 1, rows), spans=spans)


def cut_to(task: StepTask, ranks: Sequence[int]) -> StepTask:
    """The part of a task that makes the payloads of these ranks alone, in ascending order: the same bytes."""
    owner = task.spans[:, SPAN_COLUMNS.index("rank")]
    kept = np.isin(owner, ranks)
    ids = np.repeat(kept, task.spans[:, SPAN_COLUMNS.index("tokens")])
    spans = task.spans[kept]
    spans[:, SPAN_COLUMNS.index("rank")] = np.searchsorted(ranks, owner[kept])
    return replace(
        task,
        shape=(len(ranks), *task.shape[1:]),
        spans=spans,
        ids=task.ids[ids],
        following=task.following[kept],
        mask=None if task.mask is None else task.mask[ids],
        following_mask=None if task.following_mask is None else task.following_mask[kept],
        columns=None if task.columns is None else task.columns.kept(kept),
    )


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """How payloads are written."""

    ext: str
    labels_shifted: bool  # y[i] = x[i+1]; else y = x, for models that shift by themselves
    padding: int  # token id
    vocabulary: int  # ids are below it
    of_micro_batch: bool = False  # a file is one micro-batch of a rank; else all of them
    columns: tuple[ColumnSpec, ...] = ()

    def records(self, spans: NDArray[np.int64], shape: tuple[int, int, int]) -> list[int]:
        """How many spans each file has, none in a file beside a rank's; their first columns are rank and micro-batch."""
        ranks, micro, _ = shape
        each = micro if self.of_micro_batch else 1
        of = spans[:, 0] * each + (spans[:, 1] if self.of_micro_batch else 0)
        counts = np.zeros((ranks * each, 1 + sum(column.own_file for column in self.columns)), np.int64)
        counts[:, 0] = np.bincount(of, minlength=ranks * each)
        found: list[int] = counts.ravel().tolist()
        return found
