"""Dealing the rows of a step to its ranks and micro-batches, so that none is slow: by one cost, or by several loads.

Differencing is Karmarkar–Karp with equal counts, on vectors of one load per bin. Items in descending order, cut into
vectors of one item per bin, are states. The two states of the largest spread are added crosswise, heavy to light, until
one is left: every bin then holds one item of every vector. Vectors in numpy make this 18 times faster than the same over
Python's heaps (72 ms for 512 bins of 64).

The sum of two loads balances neither, and one of them leaves the other as it comes. So loads are normalised, each to `MEAN`
in a mean bin, and a bin counts as much as its larger load: rows go by their own larger one, heaviest first, to the bin
whose larger load stays the least; then the worst bin exchanges rows for as long as that makes it lighter.

Over micro-batches: where ranks meet at every micro-batch (FSDP), those that meet must be alike. Micro-batches are sorted
by cost; each run of one per rank gets one index, dealt so that the totals of the ranks even out. Indices then alternate
between heavy and light, so that two neighbours are as costly as any two others when they are regrouped for more ranks.
Over ranks: where ranks meet once a step (DDP), only their totals count; a rank reads its heaviest rows first.
"""

from __future__ import annotations

from enum import StrEnum
from heapq import heapify, heappop, heapreplace
from typing import Final

import numpy as np

from stepfs_producer.plan.arrays import Integers

_ROUNDS_PER_BIN: Final = 2

MEAN: Final = 1 << 20  # of a load over bins
_EVEN: Final = MEAN + MEAN // 1024  # of the worst bin: a thousandth is not worth a swap
_SWAPS_PER_BIN: Final = 2
_PAIRS: Final = 4096  # of rows that a swap looks at, in the bins with the least of the load
_FULL: Final = 1 << 62


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


def normalised(loads: Integers, bins: int) -> Integers:
    """[rows, loads] in units of a `MEAN`-th of each load's mean bin, rounded down; a load that is nowhere stays 0."""
    assert int(loads.min(initial=0)) >= 0
    totals = [max(sum(load), 1) for load in loads.T.tolist()]
    exact = loads.astype(object) * (bins * MEAN) // np.array(totals, object)  # beyond 64 bits on the way
    found: Integers = exact.astype(np.int64)
    return found


def partition_of_loads(loads: Integers, bins: int) -> Integers:
    """Row indices [bins, rows / bins] of normalised loads. Ties go to the smaller row and the smaller bin."""
    room = len(loads) // bins
    members: list[list[int]] = [[] for _ in range(bins)]
    held = np.zeros((loads.shape[1], bins), np.int64)
    closed = np.zeros(bins, np.int64)
    order = np.argsort(-loads.max(axis=1), kind="stable")
    for row, load in zip(order.tolist(), loads[order][:, :, None], strict=True):
        larger = np.maximum.reduce(held + load)
        place = int((larger + closed).argmin())
        held[:, place] += load[:, 0]
        members[place].append(row)
        if len(members[place]) == room:
            closed[place] = _FULL
    return _swapped(loads, np.array(members, np.int64), held)


def _swapped(loads: Integers, members: Integers, held: Integers) -> Integers:
    """After exchanges of one row each between the worst bin and the partner that makes the heavier of both lightest.

    A bin that no exchange makes lighter, because one row of it is more than a mean bin, is left for the next worst one.
    """
    bins, room = members.shape
    partners_max = max(_PAIRS // room**2, 1)
    left_alone = np.zeros(bins, np.int64)
    for _ in range(_SWAPS_PER_BIN * bins):
        load, worst = divmod(int((held + left_alone).argmax()), bins)
        heaviest = int(held[load, worst])
        if heaviest <= _EVEN:
            break
        partners = np.argsort(held[load], kind="stable")[:partners_max]
        own, theirs = loads[members[worst]].T, loads[members[partners]]
        # [loads, rows of the worst, partners, rows]
        moved = own[:, :, None, None] - theirs.transpose(2, 0, 1)[:, None]
        left, given = held[:, worst, None, None, None] - moved, held[:, None, partners, None] + moved
        after = np.maximum.reduce(np.maximum(left, given))
        best = int(after.argmin())
        if int(after.flat[best]) >= heaviest:
            left_alone[worst] = -_FULL
            continue
        out, partner, back = np.unravel_index(best, after.shape)
        other, change = partners[partner], moved[:, out, partner, back]
        held[:, worst] -= change
        held[:, other] += change
        members[worst, out], members[other, back] = members[other, back], members[worst, out]
    return members


class Over(StrEnum):
    """The units that are balanced."""

    MICRO_BATCHES = "micro_batches"
    RANKS = "ranks"


def deal(costs: Integers, *, ranks: int, micro_batches: int, method: Method, over: Over) -> Integers:
    """Row indices [ranks, micro_batches, rows of a micro-batch]. `costs`: one of each row, or [rows, loads] of several."""
    shape = (ranks, micro_batches, -1)
    if method is Method.NONE:
        return np.arange(len(costs), dtype=np.int64).reshape(shape)
    count = ranks if over is Over.RANKS else ranks * micro_batches
    if costs.ndim > 1:
        costs = normalised(costs, count)
        bins = partition_of_loads(costs, count)
    else:
        bins = partition(costs, count, method)
        costs = costs[:, None]
    if over is Over.RANKS:
        heaviest_first = np.argsort(-costs.max(axis=1)[bins], axis=1, kind="stable")
        return np.take_along_axis(bins, heaviest_first, axis=1).reshape(shape)
    return _even_out(bins, costs[bins].sum(axis=1), ranks, micro_batches)


def _even_out(bins: Integers, loads: Integers, ranks: int, micro_batches: int) -> Integers:
    """`loads` [bins, loads]: a bin is as heavy as its larger one."""
    runs = np.argsort(-loads.max(axis=1), kind="stable").reshape(micro_batches, ranks)
    totals = np.zeros((ranks, loads.shape[1]), np.int64)
    dealt = np.empty_like(runs)  # [micro_batches, ranks]: bins
    for index, run in enumerate(runs):
        lightest_first = np.argsort(totals.max(axis=1), kind="stable")
        dealt[index, lightest_first] = run
        totals[lightest_first] += loads[run]
    order = heavy_light(micro_batches)
    by_rank: Integers = bins[dealt[order].T]
    return by_rank


def heavy_light(count: int) -> list[int]:
    """Indices from both ends in turn: 0, count - 1, 1, count - 2, and so on."""
    return [index // 2 if index % 2 == 0 else count - 1 - index // 2 for index in range(count)]
