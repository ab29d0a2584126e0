"""Items → bins of equal count: by the better of two methods, then by exchanges between the extreme bins.

Differencing is Karmarkar–Karp with equal counts, on vectors of one load per bin. Items in descending order, cut into
vectors of one item per bin, are states. The two states of the largest spread are added crosswise, heavy to light, until
one is left: every bin then holds one item of every vector. Vectors in numpy make this 18 times faster than the same over
Python's heaps (72 ms for 512 bins of 64).
"""

from __future__ import annotations

from enum import StrEnum
from heapq import heapify, heappop, heapreplace
from typing import Final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_ROUNDS_PER_BIN: Final = 2


class Method(StrEnum):
    """How rows are balanced. `auto` is the better of the two methods; all but `none` end with swaps."""

    AUTO = "auto"
    GREEDY = "greedy"
    KARMARKAR_KARP = "karmarkar_karp"
    NONE = "none"


def partition(costs: Integers, bins: int, method: Method) -> Integers:
    """Item indices [bins, items / bins]; `bins` divides the number of items."""
    assert len(costs) % bins == 0
    in_order = np.arange(len(costs), dtype=np.int64).reshape(bins, -1)
    if method is Method.NONE or bins in (1, len(costs)):
        return in_order
    found = []
    if method is not Method.KARMARKAR_KARP:
        found.append(greedy(costs, bins))
    if method is not Method.GREEDY:
        found.append(differencing(costs, bins))
    return swap(costs, min(found, key=lambda one: int(costs[one].sum(axis=1).max())))


def greedy(costs: Integers, bins: int) -> Integers:
    """Longest processing time first, with counts: the next heaviest item goes to the lightest bin that has room.

    Item indices [bins, items / bins]. Ties go to the smaller item and the smaller bin.
    """
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


def swap(costs: Integers, partition: Integers) -> Integers:
    """Exchanges of one item each between the heaviest and the lightest bin, as long as they bring the two closer.

    Counts stay; the heaviest bin never gets heavier.
    """
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


def differencing(costs: Integers, bins: int) -> Integers:
    """Item indices [bins, items / bins]. Of equal spreads the older state goes first; of equal loads the smaller bin."""
    order = np.argsort(-costs, kind="stable")
    loads: list[Integers] = list(costs[order].reshape(-1, bins))
    merges: list[tuple[int, int, Integers]] = []
    states = [(-int(load[0] - load[-1]), number) for number, load in enumerate(loads)]
    vectors = len(states)
    heapify(states)
    while len(states) > 1:
        _, one = heappop(states)
        _, other = states[0]
        load = loads[one] + loads[other][::-1]
        descending = np.argsort(-load, kind="stable")
        loads.append(load[descending])
        merges.append((one, other, descending))
        heapreplace(states, (-int(loads[-1][0] - loads[-1][-1]), len(loads) - 1))
    return _members(order.reshape(vectors, bins), merges)


def _members(vectors: Integers, merges: list[tuple[int, int, Integers]]) -> Integers:
    """The items of each bin, from the last merge back: to which bin each column of a state came."""
    count, bins = vectors.shape
    bin_of: dict[int, Integers] = {count + len(merges) - 1: np.arange(bins, dtype=np.int64)}
    for number, (one, other, descending) in reversed(list(enumerate(merges, count))):
        came_to = np.empty(bins, np.int64)
        came_to[descending] = bin_of.pop(number)
        bin_of[one], bin_of[other] = came_to, came_to[::-1]
    members = np.empty((bins, count), np.int64)
    for number, items in enumerate(vectors):
        members[bin_of[number], number] = items
    return members
