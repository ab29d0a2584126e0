"""Exchanges between the heaviest and the lightest bin, as long as they bring the two closer."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_ROUNDS_PER_BIN: Final = 2


def swap(costs: Integers, partition: Integers) -> Integers:
    """The partition after exchanges of one item each. Counts stay; the heaviest bin never gets heavier."""
    partition = partition.copy()
    cost_of = costs[partition]
    loads = cost_of.sum(axis=1)
    for _ in range(_ROUNDS_PER_BIN * len(partition)):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        gap = int(loads[heavy] - loads[light])
        moved = cost_of[heavy][:, None] - cost_of[light][None, :]
        after = np.abs(gap - 2 * moved)  # the gap between the two when `moved` has gone over
        best = int(after.argmin())
        if int(after.flat[best]) >= gap:
            break
        out, back = divmod(best, cost_of.shape[1])
        for table in (partition, cost_of):
            table[heavy, out], table[light, back] = table[light, back], table[heavy, out]
        loads[heavy] -= moved[out, back]
        loads[light] += moved[out, back]
    return partition
