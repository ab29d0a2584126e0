"""How even and how full planned steps are: the computed rows of PLANNING.md, on lengths as measured for web text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bench_plan.lengths import lognormal
from bench_plan.planned import rules, shares, slowdown, steps
from stepfs_producer.plan.arrays import Integers
from stepfs_producer.plan.balance import Method, Over
from stepfs_producer.plan.cost import TOKENS, CostModel
from stepfs_producer.plan.mix import MixEntry
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


PRICE = 8000  # of a patch of the encoder, beside 6 × 4096 of a token of the backbone
PATCHES_A_TOKEN = 4


def documents(images: bool, count: int) -> tuple[Integers, Integers]:
    """Tokens, their end included, and patches: half of them have an image of a lognormal size in front of their text."""
    if not images:
        return lognormal(7, count) + 1, np.zeros(count, np.int64)
    draw = np.random.default_rng(5)
    text = np.exp(draw.normal(6, 1.2, count)).astype(np.int64) + 1
    pixels = (np.exp(draw.normal(7, 0.9, count)) * (draw.random(count) < 0.5)).astype(np.int64)
    patches = np.minimum(pixels, 4096) // PATCHES_A_TOKEN * PATCHES_A_TOKEN
    return np.minimum(text, 4000) + patches // PATCHES_A_TOKEN + 1, patches


def drawn_rows(length: int, cost: CostModel, documents: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Tokens, and cost of backbone and encoder, of rows that a rank fills with documents as they come: one ends with
    padding before the document that does not fit; a document longer than a row is cut, as plans do.
    """
    row: list[int] = []
    encoder = 0
    for tokens, patches in documents:
        while tokens > (left := length - sum(row)):
            taken = 0 if row else left
            segments = np.array([*row, left])
            yield sum(row) + taken, int(cost.of_tokens({"tokens": segments}).sum()), encoder
            row, encoder, tokens = [], 0, tokens - taken  # noqa: PLW2901
        row.append(tokens)
        encoder += PRICE * patches


def speed(tokens: int, costs: np.ndarray) -> float:
    """Tokens by time of compute, from costs [loads, ranks, micro-batches]: at each of these ranks wait for the slowest,
    of the backbone and of the encoder.
    """
    return tokens / costs.max(axis=1).sum()


@pytest.mark.parametrize(
    ("length", "cost", "images", "gain"),
    [(16384, CHEAP, False, 1.1), (16384, QUADRATIC, False, 2), (4096, CHEAP, True, 1.3), (8192, CHEAP, True, 1.15)],
)
def test_a_planned_job_computes_faster_than_one_that_draws_its_documents_at_random(length, cost, images, gain):
    """8 ranks, 8 micro-batches of one row. Padding is computed, too, as its own segment."""
    ranks, count = 8, 10
    tokens, patches = documents(images, ranks * ROWS * length * (count + 2) // 500)
    more = {"columns": ("pixels",), "loads": (TOKENS, "pixels")} if images else {}
    chosen = rules({"s": 1}, length, ranks, micro_batches=ROWS, micro_batch_tokens=length, cost=cost, **more)
    ours = []
    for plan in steps(chosen, {"s": tokens}, count, {"s": patches[:, None]} if images else {}):
        place = plan.spans[:, Span.RANK] * ROWS + plan.spans[:, Span.MICRO]
        padding = length - np.bincount(place, plan.spans[:, Span.TOKENS], ranks * ROWS).astype(np.int64)
        backbone = plan.loads[TOKENS] if images else plan.costs
        encoder = PRICE * plan.loads["pixels"] if images else np.zeros_like(backbone)
        padded = backbone + cost.of_tokens({"tokens": padding}).reshape(backbone.shape)
        ours.append(speed(plan.tokens, np.stack([padded, encoder])))
    order = np.random.default_rng(1).permutation(len(tokens))
    dealt = [
        iter(zip(tokens[order[rank::ranks]].tolist(), patches[order[rank::ranks]].tolist(), strict=True))
        for rank in range(ranks)
    ]
    filled = [drawn_rows(length, cost, one) for one in dealt]
    theirs = []
    for _ in range(count):
        found = np.array([[next(rank) for _ in range(ROWS)] for rank in filled])
        theirs.append(speed(found[:, :, 0].sum(), found[:, :, 1:].transpose(2, 0, 1)))
    assert np.mean(ours) >= gain * np.mean(theirs)


@pytest.mark.parametrize(("data", "bound"), [(16, 1.01), (32, 1.01), (64, 1.01), (128, 1.05)])
def test_trainers_of_another_size_are_even_too(data, bound):
    """Units in order, as a mesh of this size reads them."""
    for plan in planned(64, 8192, over=Over.MICRO_BATCHES):
        assert slowdown(plan.costs.reshape(data, -1), meet=False) <= bound


@pytest.mark.parametrize(("rows", "bound", "count"), [(1024, 0.999, 2), (64, 0.985, 10), (16, 0.97, 20), (8, 0.95, 20)])
def test_rows_are_full(rows, bound, count):
    plans = list(steps(rules({"s": 1}, 4096, rows), {"s": lognormal(2, 100_000)}, count))
    assert sum(plan.tokens / plan.room for plan in plans) / count >= bound


@pytest.mark.parametrize("sources", [3, pytest.param(16, marks=pytest.mark.nightly)])
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
