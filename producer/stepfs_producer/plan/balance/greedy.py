"""Longest processing time first, with counts: the next heaviest item goes to the lightest bin that has room."""

from __future__ import annotations

from heapq import heappop, heapreplace

import numpy as np
from numpy.typing import NDArray


def greedy(costs: NDArray[np.int64], bins: int) -> NDArray[np.int64]:
    """Item indices [bins, items / bins]. Ties go to the smaller item and the smaller bin."""
    room = len(costs) // bins
    order = np.argsort(-costs, kind="stable")
    taken = [0] * bins
    members: list[list[int]] = [[] for _ in range(bins)]
    lightest = [(0, number) for number in range(bins)]
    for item, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        load, number = lightest[0]
        members[number].append(item)
        taken[number] += 1
        if taken[number] == room:
            heappop(lightest)
        else:
            heapreplace(lightest, (load + cost, number))
    return np.array(members, np.int64).reshape(bins, room)
