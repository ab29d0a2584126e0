"""Rows of a step: what is packed into each, what each costs, and which rank gets it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import combinations, pairwise, takewhile

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planned import Corpus, rules, steps

from stepfs.errors import UsageError
from stepfs_producer.plan.balance import Method, Over, deal, differencing, greedy, heavy_light, partition, swap
from stepfs_producer.plan.cost import EXACT_MAX, CostModel, row_costs
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.pack import best_fit, concat
from stepfs_producer.plan.parts import Output
from stepfs_producer.plan.rules import Packing
from stepfs_producer.plan.sources import Text
from stepfs_producer.run.memory import memory_of
from stepfs_producer.run.prepare import compile_plan

LENGTH = 16
lengths = st.lists(st.integers(1, LENGTH), max_size=40)


def drawn(chosen: list[int], rows: int) -> list[int]:
    """As drawing leaves them: a prefix that is at most as long as the rows."""
    total = 0
    for index, tokens in enumerate(chosen):
        total += tokens
        if total > rows * LENGTH:
            return chosen[:index]
    return chosen


@given(lengths, st.integers(1, 6))
def test_best_fit_keeps_a_prefix_in_rows_that_are_not_too_full(chosen: list[int], rows: int) -> None:
    given_lengths = drawn(chosen, rows)
    row_of = best_fit(given_lengths, rows=rows, sequence_length=LENGTH)
    used: Counter[int] = Counter()
    for tokens, row in zip(given_lengths, row_of, strict=False):
        used[row] += tokens
    assert len(row_of) <= len(given_lengths)
    assert set(used) <= set(range(rows))
    assert max(used.values(), default=0) <= LENGTH


@given(lengths, st.integers(1, 6))
def test_what_best_fit_leaves_out_next_fits_nowhere(chosen: list[int], rows: int) -> None:
    given_lengths = drawn(chosen, rows)
    row_of = best_fit(given_lengths, rows=rows, sequence_length=LENGTH)
    free = [LENGTH] * rows
    for tokens, row in zip(given_lengths, row_of, strict=False):
        free[row] -= tokens
    if len(row_of) < len(given_lengths):
        assert given_lengths[len(row_of)] > max(free)


class PlainRows:
    """The rule of best fit without any shortcut: each document looks at every row."""

    def __init__(self, rows: int) -> None:
        self.free = [(LENGTH, -row, row) for row in range(rows)]  # tokens that are free, since when, in which row
        self.now = 0

    def place(self, tokens: int) -> int:
        room = [one for one in self.free if one[0] >= tokens]
        if not room:
            return -1
        best = min(room, key=lambda one: (one[0], -one[1]))
        self.now += 1
        self.free[self.free.index(best)] = (best[0] - tokens, self.now, best[2])
        return best[2]


def one_by_one(chosen: list[int], rows: int) -> list[int]:
    kept = len(chosen)
    while True:
        plain = PlainRows(rows)
        longest_first = sorted(range(kept), key=lambda index: -chosen[index])
        row_of = {index: plain.place(chosen[index]) for index in longest_first}
        left = sum(chosen[index] for index, row in row_of.items() if row < 0)
        if not left:
            break
        dropped = 0
        while dropped < left:
            kept -= 1
            dropped += chosen[kept]
    after = list(takewhile(lambda row: row >= 0, map(plain.place, chosen[kept:])))
    return [row_of[index] for index in range(kept)] + after


@given(st.lists(st.integers(1, LENGTH), max_size=60) | st.lists(st.integers(1, 5), max_size=60), st.integers(1, 12))
def test_best_fit_places_each_document_where_it_would_stand_alone(chosen: list[int], rows: int) -> None:
    given_lengths = drawn(chosen, rows)
    assert best_fit(given_lengths, rows=rows, sequence_length=LENGTH) == one_by_one(given_lengths, rows)


def test_best_fit_exactly() -> None:
    assert best_fit([6, 10, 9, 5, 2], rows=2, sequence_length=16) == [0, 0, 1, 1, 1]
    # 9 and 9 do not share a row: the last drawn are dropped until 9 tokens are, then 4 fits again, 9 does not.
    assert best_fit([9, 9, 4, 9, 1], rows=2, sequence_length=16) == [0, 1, 1]
    # 16 tokens do not fit beside 11, 10 and 10: both last ones are dropped, and then the first of them has a row.
    assert best_fit([10, 7, 9, 10, 11], rows=3, sequence_length=16) == [0, 1, 1, 2]
    assert best_fit([], rows=2, sequence_length=16) == []


def test_dropping_goes_from_the_end_never_from_the_middle() -> None:
    # 15 + 15 + 2 are as much as two rows hold, but 2 fits in no row: it was drawn first, so a 15 goes.
    assert best_fit([2, 15, 15], rows=2, sequence_length=16) == [1, 0]


@given(lengths, st.integers(1, 6))
def test_concat_fills_rows_in_order_and_cuts_at_their_ends_only(chosen: list[int], rows: int) -> None:
    parts = concat(chosen, rows=rows, sequence_length=LENGTH)
    at = 0
    for part in parts:
        assert part.row == at // LENGTH
        assert at % LENGTH + part.tokens <= LENGTH
        at += part.tokens
    assert at == min(sum(chosen), rows * LENGTH)
    taken: Counter[int] = Counter()
    for part in parts:
        assert part.first == taken[part.sample]
        taken[part.sample] += part.tokens
    assert all(taken[sample] == chosen[sample] for sample in list(taken)[:-1])


def test_concat_exactly() -> None:
    assert concat([10, 10, 20], rows=2, sequence_length=16) == [
        (0, 0, 10, 0), (1, 0, 6, 0), (1, 6, 4, 1), (2, 0, 12, 1),
    ]  # fmt: skip


def test_parts_of_a_document_that_go_on_in_a_row_are_one_span() -> None:
    """A document longer than the rows is drawn in parts; its rows must not show where they met."""
    chosen = rules({"a": 1}, lengths={0: 64}, ranks=1, micro_batch_tokens=256, packing=Packing.CONCAT)
    plans = steps(chosen, {"a": Corpus("a", longest=900)}, 12)
    parts = 0
    for plan in plans:
        for before, after in pairwise(plan.spans.tolist()):
            goes_on = before[5:10] == after[5:10] and before[10] + before[4] == after[10]
            assert not (goes_on and before[:3] == after[:3])
            parts += goes_on
    assert parts > 12, "documents go on in the next row"
    assert all(plan.tokens == plan.room for plan in plans)


METHODS = [greedy, differencing, *(lambda costs, bins, m=m: partition(costs, bins, m) for m in Method)]
problems = st.tuples(st.integers(1, 5), st.integers(1, 6)).flatmap(
    lambda shape: st.tuples(
        st.just(shape[0]), st.lists(st.integers(0, 1000), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    )
)


@pytest.mark.parametrize("method", METHODS)
@given(problem=problems)
def test_every_item_is_in_one_bin_and_counts_are_equal(method, problem) -> None:
    bins, costs = problem
    found = method(np.array(costs, np.int64), bins)
    assert found.shape == (bins, len(costs) // bins)
    assert sorted(found.reshape(-1).tolist()) == list(range(len(costs)))


@given(problems)
def test_swaps_keep_counts_and_never_make_the_heaviest_heavier(problem) -> None:
    bins, costs = problem
    before = np.arange(len(costs)).reshape(bins, -1)
    array = np.array(costs, np.int64)
    after = swap(array, before)
    assert sorted(after.reshape(-1).tolist()) == list(range(len(costs)))
    assert array[after].sum(axis=1).max() <= array[before].sum(axis=1).max()


@given(st.lists(st.integers(0, 100), min_size=8, max_size=8))
def test_two_bins_are_near_the_best_of_all_partitions(costs: list[int]) -> None:
    best = min(max(sum(half), sum(costs) - sum(half)) for half in combinations(costs, 4))
    found = np.array(costs)[partition(np.array(costs, np.int64), 2, Method.AUTO)].sum(axis=1).max()
    assert found <= best + max(costs) // 2


def test_greedy_and_differencing_exactly() -> None:
    costs = np.array([8, 7, 6, 5, 4, 1], np.int64)
    assert greedy(costs, 2).tolist() == [[0, 3, 4], [1, 2, 5]]  # 8 + 5 + 4 is heavier, but the other is full
    assert differencing(costs, 2).tolist() == [[1, 3, 4], [0, 2, 5]]  # 16 and 15
    assert costs[swap(costs, greedy(costs, 2))].sum(axis=1).tolist() == [16, 15]


def reference(costs: list[int], bins: int) -> list[list[int]]:
    """Differencing by lists, whose sort is stable everywhere."""
    order = sorted(range(len(costs)), key=lambda item: -costs[item])
    made = [[(costs[item], [item]) for item in order[first : first + bins]] for first in range(0, len(costs), bins)]
    states = dict(enumerate(made))
    while len(states) > 1:
        one, other = sorted(states, key=lambda number: (states[number][-1][0] - states[number][0][0], number))[:2]
        pairs = zip(states.pop(one), reversed(states.pop(other)), strict=True)
        summed = [(a + b, items + more) for (a, items), (b, more) in pairs]
        states[len(made)] = sorted(summed, key=lambda load: -load[0])
        made.append([])
    return [sorted(items, key=order.index) for _, items in next(iter(states.values()))]


@pytest.mark.parametrize("distinct", [1, 2, 5, 1000])
def test_equal_loads_are_ordered_as_a_stable_sort_orders_them(distinct: int) -> None:
    """Hazard P1: an unstable sort of numpy depends on the machine, and one flipped tie is another step."""
    bits = np.random.Philox(key=distinct, counter=0).random_raw(64 * 6)
    costs = (bits % distinct).astype(np.int64)
    assert differencing(costs, 64).tolist() == reference(costs.tolist(), 64)


def rows(count: int, length: int) -> np.ndarray:
    """Costs of packed rows: most documents are short, a few fill a row; not a float on the way."""
    bits = np.random.Philox(key=1, counter=0).random_raw(count * 16)
    tokens = 1 + (length >> (bits >> np.uint64(32)).astype(np.int64) % 7) * (bits % 1000).astype(np.int64) // 1001
    total = np.cumsum(tokens)
    tokens = tokens[total <= count * length]
    row = best_fit(tokens.tolist(), rows=count, sequence_length=length)
    return row_costs(CostModel(24576, 1).of_samples({"tokens": tokens[: len(row)]}), np.array(row), count)


@pytest.mark.parametrize("each", [8, 64])
def test_auto_is_even_where_each_method_alone_may_not_be(each: int) -> None:
    costs = rows(64 * each, 16384)
    loads = costs[partition(costs, 64, Method.AUTO)].sum(axis=1)
    alone = [costs[method(costs, 64)].sum(axis=1).max() for method in (greedy, differencing)]
    assert loads.max() <= min(alone)
    assert loads.max() * 64 * 100 <= loads.sum() * 102


def test_ranks_that_meet_at_a_micro_batch_carry_alike() -> None:
    costs = rows(64 * 8, 8192)
    dealt = deal(costs, ranks=16, micro_batches=4, method=Method.AUTO, over=Over.MICRO_BATCHES)
    assert dealt.shape == (16, 4, 8)
    loads = costs[dealt].sum(axis=2)
    assert (loads.max(axis=0) * 16 * 100 <= loads.sum(axis=0) * 105).all()
    means = loads.sum(axis=0).tolist()
    assert sorted(range(4), key=means.__getitem__, reverse=True) == [0, 2, 3, 1]  # heavy, light, heavy, light


def test_over_ranks_the_totals_are_even_and_a_rank_begins_with_its_heaviest() -> None:
    costs = rows(16 * 8, 8192)
    dealt = deal(costs, ranks=16, micro_batches=4, method=Method.AUTO, over=Over.RANKS)
    totals = costs[dealt].sum(axis=(1, 2))
    assert totals.max() * 16 * 100 <= totals.sum() * 102
    read = costs[dealt].reshape(16, -1)
    assert (read[:, :-1] >= read[:, 1:]).all()


def test_none_deals_rows_as_they_come() -> None:
    dealt = deal(np.arange(12), ranks=2, micro_batches=3, method=Method.NONE, over=Over.MICRO_BATCHES)
    assert dealt.tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]


def test_heavy_and_light_alternate() -> None:
    assert heavy_light(5) == [0, 4, 1, 3, 2]
    assert heavy_light(4) == [0, 3, 1, 2]


def columns(*tokens: int) -> dict[str, np.ndarray]:
    numbers = np.arange(len(tokens))
    return {"tokens": np.array(tokens, np.int64), "source": numbers, "record": numbers, "first": numbers}


def test_hidden_size_gives_the_cost_of_a_transformer() -> None:
    assert CostModel.of_hidden_size(4096) == CostModel(24576, 1)
    assert CostModel(24576, 1).of_samples(columns(1, 4096)).tolist() == [24577, 24576 * 4096 + 4096**2]


def test_the_documents_of_a_row_add_up() -> None:
    costs = CostModel(2, 1).of_samples(columns(3, 4, 5))
    assert row_costs(costs, np.array([1, 1, 0]), 3).tolist() == [35, 15 + 24, 0]


def test_a_cost_that_overflows_int64_names_a_divisor() -> None:
    with pytest.raises(UsageError, match=r"1048576 tokens overflows.*divide its coefficients by 4096"):
        CostModel(0, 1 << 25).of_samples(columns(5, 1 << 20))
    with pytest.raises(UsageError, match="overflow; divide them by 2048"):
        row_costs(np.full(4, 1 << 62, np.int64), np.zeros(4, np.int64), 1)


def test_rows_that_could_not_be_compared_exactly_name_a_divisor() -> None:
    assert row_costs(np.array([EXACT_MAX // 8]), np.array([3]), 8)[3] == EXACT_MAX // 8
    with pytest.raises(UsageError, match=r"8 rows.*exceed 2\*\*53; divide the cost by 2$"):
        row_costs(np.array([EXACT_MAX // 8 + 1]), np.array([3]), 8)


def raising(of):
    raise KeyError("pixels")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda of: of["tokens"] * 1.5, "returned float64; round the costs and return int64"),
        (lambda of: np.where(of["tokens"] == 4, np.nan, 1.0), r"float64 \(NaN for sample address 1\)"),
        (lambda of: 4 - of["tokens"], "cost of sample address 2 is -1"),
        (lambda of: of["tokens"] << 52, r"cost of sample address 0 is \d+; return costs from 0 to 2\*\*53"),
        (lambda of: of["tokens"][:2], r"shape \(2,\) for 3 samples"),
        (lambda of: None, "for 3 samples; return one cost each"),
        (raising, "the cost function raising raised KeyError: 'pixels'"),
    ],
)
def test_a_users_function_is_held_to_its_word(call, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CostModel(call=call).of_samples(columns(3, 4, 5), lambda index: f"address {index}")


def test_a_users_function_sees_the_columns() -> None:
    cost = CostModel(call=lambda of: of["tokens"] * 10 + of["source"])
    assert cost.of_samples(columns(3, 4)).tolist() == [30, 41]


MIB = 1 << 20


@dataclass
class OfBlocks:
    largest_block_bytes: int

    @property
    def layout(self):
        return self


def cost_rules(length: int):
    plan = Plan(output=Output(mesh="dp=64", sequence_length=length), sources={"a": Text("x")})
    return compile_plan(plan, listings={}, tokenizer_digest="").rules


@given(
    st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=40), st.sampled_from([64, 4096, 65536]), st.integers(1, 8)
)
@example([64 * MIB] * 40, 4096, 2)
def test_what_a_refusal_names_is_enough_and_no_less_is(blocks, length, workers):
    sources = tuple(map(OfBlocks, blocks))
    with pytest.raises(UsageError) as caught:
        memory_of(1, cost_rules(length), sources, workers)
    named = int(re.search(r"the run needs (\d+) MiB", str(caught.value))[1]) * MIB
    memory = memory_of(named, cost_rules(length), sources, workers)
    assert memory.held_bytes >= 0
    assert memory.least <= named < memory.least + MIB
    with pytest.raises(UsageError):
        memory_of(named - MIB, cost_rules(length), sources, workers)


def test_samples_ahead_and_pending_uploads_share_what_lies_above_the_least():
    sources = (OfBlocks(8 * MIB),)
    for total in (512 * MIB, 8192 * MIB):
        memory = memory_of(total, cost_rules(64), sources, 2)
        assert memory.pending_bytes == min(512 * MIB, total // 4)
        assert memory.held_bytes == total - (memory.least - 64 * MIB) - memory.pending_bytes
