"""Packing: rows are never too full, a step keeps a prefix, and no document is cut that fits."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, takewhile

from hypothesis import given
from hypothesis import strategies as st
from planned import Corpus, rules, steps

from stepfs_producer.plan.pack import best_fit, concat
from stepfs_producer.plan.rules import Packing

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
