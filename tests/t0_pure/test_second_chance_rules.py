"""Which needs of the past count at some grace, and what a reclaimer makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepfs.errors import RefusedError
from stepfs.format.control import MINIMA_MAX, ControlRecord, GroupRecord
from stepfs.format.ids import Step
from stepfs.lake.decisions import Add, Retire, Revise, decide, least_need, successor
from stepfs.lake.reclaim.run import Need, reclaim_bound

GRACE_S = 3600.0
EMPTY = ControlRecord(b"i" * 16, 1)


def record(*minima: tuple[int, int], first_live: int = 3) -> ControlRecord:
    """With one group, whose need is the last of the minima."""
    need = Step(minima[-1][1])
    return replace(
        EMPTY,
        first_live_step=Step(first_live),
        groups={"run": GroupRecord(Step(0), (need,))},
        minima=tuple((number, Step(step)) for number, step in minima),
    )


@pytest.mark.parametrize(
    ("minima", "ages_s", "expected"),
    [
        ([(5, 20)], {}, 20),
        ([(4, 10), (5, 20)], {4: 3599.0}, 10),
        ([(4, 10), (5, 20)], {4: 3600.0}, 20),
        ([(4, 10), (5, 20)], {}, 10),  # a LIST that does not show it yet
        ([(2, 5), (3, 10), (4, 15), (5, 20)], {2: 9000.0, 3: 5000.0, 4: 10.0}, 15),
        ([(2, 5), (3, 10), (4, 15), (5, 20)], {2: 10.0, 3: 5000.0, 4: 5000.0}, 5),  # by a store whose ages are wrong
    ],
)
def test_a_need_counts_until_the_record_that_ended_it_is_as_old_as_the_grace(minima, ages_s, expected):
    assert least_need(record(*minima), ages_s, GRACE_S) == expected


def test_without_grace_the_newest_record_alone_counts() -> None:
    assert least_need(record((4, 10), (5, 20)), {4: 0.0}, 0.0) == 20


def said(*kept: int) -> ControlRecord:
    """After a group has kept these checkpoints, one after another."""
    now = EMPTY
    for number, step in enumerate(kept):
        after = decide(number - 1, now, Revise("run", lambda _, step=step: frozenset({Step(step)})))  # type: ignore[misc]
        assert after is not None
        now = after
    return now


@pytest.mark.parametrize(
    ("kept", "minima"),
    [
        ((10,), [(0, 0), (1, 10)]),
        ((10, 20, 30), [(0, 0), (1, 10), (2, 20), (3, 30)]),
        ((10, 30, 20), [(0, 0), (1, 10), (3, 20)]),  # 30 held nothing back that 20 does not
        ((10, 30, 5), [(0, 0), (3, 5)]),
        ((10, 30, 10, 30), [(0, 0), (3, 10), (4, 30)]),  # 10 ended last in record 3
    ],
)
def test_a_record_carries_the_rising_minima_of_the_past(kept, minima):
    assert list(said(*kept).minima) == minima


def test_a_retired_group_counts_by_what_it_needed_and_a_new_one_from_its_first_second_as_if_it_needed_all():
    two = decide(1, said(10, 20), Add("other", Step(40)))
    assert two is not None
    alone = decide(2, two, Retire("run"))
    assert alone is not None
    assert list(alone.minima)[-2:] == [(3, 20), (4, 40)]
    assert least_need(alone, {0: 9000.0, 1: 9000.0, 3: 5.0}, GRACE_S) == 20
    assert least_need(said(40), {0: 5.0}, GRACE_S) == 0


def test_minima_of_steps_that_are_given_up_leave_the_record() -> None:
    after = successor(2, said(10, 20, 30), first_live_step=Step(25))
    assert list(after.minima) == [(2, 25), (4, 30)]


def test_without_a_reclaimer_the_minima_stay_bounded_and_hold_back_too_much_rather_than_too_little() -> None:
    steps = range(1, 3 * MINIMA_MAX)
    now = said(*steps)
    assert len(now.minima) == MINIMA_MAX
    numbers = [number for number, _ in now.minima]
    for age_from in (1, len(steps) // 2, len(steps) - 2):
        ages_s = {number: 0.0 if number >= age_from else 2 * GRACE_S for number in numbers}
        exact = ([0, *steps])[age_from]
        assert least_need(now, ages_s, GRACE_S) <= exact


def need(now: ControlRecord, next_step: int = 100, age_s: float = 7.0) -> Need:
    return reclaim_bound(now, {number: age_s for number, _ in now.minima[:-1]}, GRACE_S, Step(next_step))


def test_what_holds_steps_back_is_named() -> None:
    assert need(record((5, 20))) == Need(Step(20), "group 'run' needs step 20")
    assert need(record((4, 10), (5, 20))) == Need(Step(10), "step 10 was needed less than 1 h ago")
    timeless = need(record((4, 10), (5, 20)), age_s=0.0)
    assert timeless.step == 10
    assert "sends no Date" in timeless.reason
    assert "--grace 0" in timeless.reason
    found = need(EMPTY)
    assert found.step is None
    assert "no group is registered" in found.reason


def test_a_need_of_what_nobody_committed_is_refused() -> None:
    with pytest.raises(RefusedError, match="another lake"):
        need(record((5, 101)))
