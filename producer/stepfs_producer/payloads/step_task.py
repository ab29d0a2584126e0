"""One planned step with the tokens it needs: everything that a constructor gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """How payloads are written."""

    ext: str
    labels_shifted: bool  # y[i] = x[i+1]; else y = x, for models that shift by themselves
    padding: int  # token id
    vocabulary: int  # ids are below it
