"""Several loads of each row at once, such as those of the encoder and of the backbone: ranks meet in both.

The sum of two loads balances neither, and one of them leaves the other as it comes. So loads are normalised, each to `MEAN`
in a mean bin, and a bin counts as much as its larger load: rows go by their own larger one, heaviest first, to the bin
whose larger load stays the least; then the worst bin exchanges rows for as long as that makes it lighter.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
MEAN: Final = 1 << 20  # of a load over bins
_EVEN: Final = MEAN + MEAN // 1024  # of the worst bin: a thousandth is not worth a swap
_SWAPS_PER_BIN: Final = 2
_PAIRS: Final = 4096  # of rows that a swap looks at, in the bins with the least of the load
_FULL: Final = 1 << 62


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
