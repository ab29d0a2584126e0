"""The arrays that a plan's steps are made of, by the names that the modules have for them."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]  # of tokens
Integers = NDArray[np.int64]  # lengths, places, numbers of records
Mask = NDArray[np.uint8]  # 1 where the loss looks

IGNORED: Final = -100  # the label that torch's cross_entropy leaves out
