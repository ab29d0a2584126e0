"""How even and how full planned steps are: the computed rows of PLANNING.md, on lengths as measured for web text."""

from __future__ import annotations

import numpy as np
import pytest

from bench_plan.lengths import lognormal
from bench_plan.planned import rules, shares, slowdown, steps
from stepfs_producer.plan.balance import Method, Over
from stepfs_producer.plan.cost import CostModel
from stepfs_producer.plan.draw import MixEntry
from stepfs_producer.plan.rules import Packing
from stepfs_producer.plan.spans import Span

ROWS = 8  # of a rank
CHEAP, QUADRATIC = CostModel.of_hidden_size(4096), CostModel(0, 1)


def planned(ranks, length, count=1, *, rows=ROWS, cost=CHEAP, **more):
    chosen = rules({"s": 1}, length, ranks, micro_batches=rows, micro_batch_tokens=length, cost=cost, **more)
    return list(steps(chosen, {"s": lognormal(1, 100_000)}, count))


def mean_slowdown(plans, *, meet):
    return sum(slowdown(plan.costs, meet=meet) for plan in plans) / len(plans)


@pytest.mark.parametrize(("over", "bound"), [(Over.RANKS, 1.02), (Over.MICRO_BATCHES, 1.05)])
@pytest.mark.parametrize("length", [4096, 16384])
@pytest.mark.parametrize("ranks", [8, 64])
def test_no_rank_waits_long_for_the_slowest(ranks, length, over, bound):
    assert mean_slowdown(planned(ranks, length, 2, over=over), meet=over is Over.MICRO_BATCHES) <= bound


@pytest.mark.parametrize(("length", "gain"), [(4096, 1.7), (8192, 2.6)])
def test_balance_gains_what_attention_costs(length, gain):
    even = planned(64, length, cost=QUADRATIC, over=Over.MICRO_BATCHES)
    plain = planned(64, length, cost=QUADRATIC, packing=Packing.CONCAT, method=Method.NONE)
    assert mean_slowdown(plain, meet=True) >= gain * mean_slowdown(even, meet=True)


@pytest.mark.parametrize(("data", "bound"), [(16, 1.01), (32, 1.01), (64, 1.01), (128, 1.05)])
def test_trainers_of_another_size_are_even_too(data, bound):
    """Units in order, as a mesh of this size reads them."""
    for plan in planned(64, 8192, over=Over.MICRO_BATCHES):
        assert slowdown(plan.costs.reshape(data, -1), meet=False) <= bound


@pytest.mark.parametrize(("rows", "bound", "count"), [(1024, 0.999, 2), (64, 0.985, 10), (16, 0.97, 20), (8, 0.95, 20)])
def test_rows_are_full(rows, bound, count):
    plans = list(steps(rules({"s": 1}, 4096, rows), {"s": lognormal(2, 100_000)}, count))
    assert sum(plan.tokens / plan.room for plan in plans) / count >= bound


@pytest.mark.parametrize("sources", [3, 16])
def test_the_share_of_each_source_is_its_schedule(sources):
    """Over any 200 steps of a ramp, in percentage points; over 1,000, as users see it, a fifth of that."""
    window = 200
    names = [f"s{number:03}" for number in range(sources)]
    first, then = ({name: number * by % 7 + 1 for number, name in enumerate(names)} for by in (1, 3))
    entries = [MixEntry(0, shares(first)), MixEntry(110, shares(then), ramp=True)]
    chosen = rules(first, 4096, 8, entries=entries, micro_batch_tokens=8 * 4096)
    kept, wanted = [], []
    for plan in steps(chosen, {name: lognormal(number, 20_000) for number, name in enumerate(names)}, window + 20):
        kept.append(np.bincount(plan.spans[:, Span.SOURCE], plan.spans[:, Span.TOKENS], sources))
        wanted.append(np.array(plan.shares) / sum(plan.shares) * plan.tokens)
    for begin in range(20):
        ours, asked = (np.sum(each[begin : begin + window], axis=0) for each in (kept, wanted))
        assert 100 * np.abs(ours / ours.sum() - asked / asked.sum()).max() <= 0.1
