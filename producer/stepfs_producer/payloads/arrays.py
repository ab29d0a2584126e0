"""The arrays of one slice: what the encoders of `encode` write, and all they know of the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
