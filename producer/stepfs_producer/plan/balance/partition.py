"""Items → bins of equal count by one of the methods."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.balance.differencing import differencing
from stepfs_producer.plan.balance.greedy import greedy
from stepfs_producer.plan.balance.swaps import swap

Integers = NDArray[np.int64]


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
