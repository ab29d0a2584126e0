"""Rows → (rank, micro-batch): which bins are balanced, and in which order a rank reads them.

Over micro-batches: where ranks meet at every micro-batch (FSDP), those that meet must be alike. Micro-batches are sorted
by cost; each run of one per rank gets one index, dealt so that the totals of the ranks even out. Indices then alternate
between heavy and light, so that two neighbours are as costly as any two others when they are regrouped for more ranks.
Over ranks: where ranks meet once a step (DDP), only their totals count; a rank reads its heaviest rows first.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.balance.loads import normalised, partition_of_loads
from stepfs_producer.plan.balance.partition import Method, partition

Integers = NDArray[np.int64]


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
