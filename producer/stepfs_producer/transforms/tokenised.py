"""Records after their transform: token ids and a loss mask as flat columns, one length per record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

BAD: Final = -1  # as a length: the record could not be decoded


@dataclass(frozen=True, slots=True)
class Tokenised:
    """The samples of consecutive records of a block, in block order."""

    lengths: NDArray[np.int64]  # per record: tokens, EOS and BOS included; 0: no sample, BAD: undecodable
    ids: NDArray[np.int32]  # of all records, end to end
    mask: NDArray[np.uint8] | None = None  # per id: 0 where the loss ignores it; None: nowhere
    bad: Mapping[int, str] = field(default_factory=dict)  # record → why
