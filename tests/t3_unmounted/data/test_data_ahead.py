"""What is fetched ahead, for the ways in which loaders really open files."""

from __future__ import annotations

import random

import pytest
from data_doubles import indices
from hypothesis import given
from hypothesis import strategies as st

from stepfs.data.access_pattern import AccessHistory, StepRate, plan_ahead, plan_start, window_steps
from stepfs.data.tuning import TUNING
from stepfs.format.ids import SliceIndex, Step


def plan(position, *, window=8, first=0, frontier=10_000, hinted=(), fixed=True):
    return plan_ahead(
        position.runs(), position.opened, hinted=frozenset(hinted), window=window, first=Step(first),
        frontier=Step(frontier), fixed=fixed,
    )  # fmt: skip


def after(*opens):
    position = AccessHistory()
    for step, index in opens:
        position.note(Step(step), SliceIndex(index))
    return position


def steps(planned):
    return [step for step, _ in planned]


IN_ORDER = [(step, 0) for step in range(10)]
ONE_LOOK = [*IN_ORDER, *[(9, index) for index in range(64)], (10, 0)]


@pytest.mark.parametrize(
    ("opens", "window", "planned"),
    [
        ([(step, 3) for step in range(10)], 8, [(step, (3,)) for step in range(10, 18)]),
        ([*IN_ORDER, *[(step, 1) for step in range(7)]], 2, [(7, (1,)), (8, (1,)), (9, (1,)), (10, (0, 1)), (11, (0, 1))]),
        ([(step, 0) for step in (0, 4, 1, 5, 2, 8, 6, 3, 9, 12)], 3, [(n, (0,)) for n in (7, 10, 11, 13, 14, 15)]),
        ([(step, 0) for step in range(0, 40, 4)], 3, [(40, (0,)), (44, (0,)), (48, (0,))]),
        (ONE_LOOK, 1, [(11, (0,))]),
        ([one for n in range(10) for one in ((n, 0), (500 + n, 1))], 2, [(10, (0,)), (510, (1,)), (11, (0,)), (511, (1,))]),
    ],
    ids=["one rank", "ranks steps apart", "forked workers", "strided", "one look at all files", "a second reader elsewhere"],
)  # fmt: skip
def test_what_is_opened_next_is_planned(opens, window, planned):
    assert plan(after(*opens), window=window) == planned


def test_the_window_opens_with_evidence():
    assert steps(plan(after((0, 0)), fixed=False)) == [1, 2]
    assert steps(plan(after((0, 0), (1, 0)), fixed=False)) == [2, 3, 4, 5]
    assert len(plan(after(*[(step, 0) for step in range(9)]), fixed=False)) == 8


def test_nothing_beyond_the_frontier_or_below_the_first_live_step():
    position = after(*[(step, 0) for step in range(10)])
    assert steps(plan(position, frontier=11)) == [10, 11]
    assert steps(plan(position, first=12)) == list(range(12, 18))


def test_a_shuffled_window_is_one_run():
    order = list(range(64))
    random.Random(5).shuffle(order)
    position = after(*[(step, 0) for step in order[:40]])
    (run,) = position.runs()
    assert run.stride == 1
    expected = sorted(set(range(run.low, 64 + 4)) - set(order[:40]))
    assert sorted(steps(plan(position, window=68 - 1 - run.high))) == expected


def test_an_outlier_dies_out():
    position = after((900, 0), *[(step, 0) for step in range(60)])
    assert max(steps(plan(position, window=4))) == 63


def test_a_second_pass_is_fetched_ahead_too():
    position = after(*[(step, 0) for step in range(100)], (0, 0), (1, 0))
    assert steps(plan(position, window=4, frontier=99))[:4] == [2, 3, 4, 5]


def test_told_slices_come_before_anything_is_opened():
    hinted = frozenset(indices(4, 5))
    assert plan_start(hinted, window=2, first=Step(7), frontier=Step(100)) == [(7, (4, 5)), (8, (4, 5))]
    assert plan_start(hinted, window=4, first=Step(7), frontier=Step(7)) == [(7, (4, 5))]
    assert plan_start(frozenset(), window=4, first=Step(0), frontier=Step(7)) == []
    assert plan(after((0, 4)), window=1, hinted=hinted) == [(0, (5,)), (1, (4, 5))]


def test_the_window_follows_pace_latency_and_budget():
    gib = 1 << 30
    assert window_steps(pace=None, latency_s=0, step_bytes=1, budget_bytes=gib) == 4
    assert window_steps(pace=2.0, latency_s=1, step_bytes=1, budget_bytes=gib) == 2 * (TUNING.horizon_s + 2) + 1
    assert window_steps(pace=2.0, latency_s=0, step_bytes=gib // 8, budget_bytes=gib) == 8
    assert window_steps(pace=0.01, latency_s=0, step_bytes=2 * gib, budget_bytes=gib) == 1


def test_pace_is_steps_per_second():
    pace = StepRate()
    assert pace.steps_per_s() is None
    for number in range(40):
        pace.note(number * 0.25)
    assert pace.steps_per_s() == 4.0


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 7)), max_size=400), st.integers(0, 40))
def test_any_order_of_opens_gives_a_bounded_plan_of_unopened_files(opens, window):
    position = after(*opens)
    planned = plan(position, window=window, first=5, frontier=500)
    assert len({step for step, _ in planned}) == len(planned)
    assert len(planned) <= TUNING.recent_steps * (16 + window)
    for step, wanted in planned:
        assert 5 <= step <= 500
        assert wanted
        assert not set(wanted) & set(position.opened(step))
