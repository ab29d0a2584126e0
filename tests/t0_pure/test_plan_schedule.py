"""Shares and stages: exact sums, and exact rounding."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from stepfs_producer.plan.draw import ONE, MixEntry, MixSchedule, Stages, apportion, normalise

weights = st.lists(st.integers(0, 10**6), min_size=1, max_size=12).filter(any)


@given(st.integers(-(10**15), 10**15), weights)
def test_what_is_apportioned_sums_up_and_is_off_by_less_than_one(total: int, chosen: list[int]) -> None:
    shares = apportion(total, chosen)
    assert sum(shares) == total
    whole = sum(chosen)
    assert all(abs(share * whole - total * weight) < whole for share, weight in zip(shares, chosen, strict=True))


def test_the_largest_remainders_get_the_rest_and_ties_go_to_the_smaller_name() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(-10, [1, 1, 1]) == [-3, -3, -4]
    assert normalise({"a": Fraction(1), "b": Fraction(1), "c": Fraction(1)}, ["a", "b", "c"]) == (
        1431655766,
        1431655765,
        1431655765,
    )


@given(weights, st.integers(1, 1000))
def test_scaling_all_weights_changes_no_share(chosen: list[int], factor: int) -> None:
    names = [f"s{index:02}" for index in range(len(chosen))]
    plain = normalise(dict(zip(names, map(Fraction, chosen), strict=True)), names)
    scaled = {name: Fraction(weight, factor) for name, weight in zip(names, chosen, strict=True)}
    assert normalise(scaled, names) == plain
    assert sum(plain) == ONE


def test_a_ramp_is_linear_from_the_entry_before_and_then_holds() -> None:
    quarter = ONE // 4
    mix = MixSchedule(
        [MixEntry(0, (ONE, 0)), MixEntry(100, (3 * quarter, quarter)), MixEntry(200, (quarter, 3 * quarter), ramp=True)]
    )
    assert mix.shares(99) == (ONE, 0)
    assert mix.shares(100) == (3 * quarter, quarter)
    assert mix.shares(150) == (2 * quarter, 2 * quarter)
    assert mix.shares(101) == (3 * quarter - 21474836, quarter + 21474836)  # 21474836.48 a step
    assert mix.shares(102) == (3 * quarter - 42949673, quarter + 42949673)  # of .96, the larger remainder
    assert mix.shares(200) == mix.shares(10**9) == (quarter, 3 * quarter)


@given(weights, st.integers(1, 10**6), st.data())
def test_shares_sum_to_one_at_every_step_of_a_ramp(chosen: list[int], span: int, data: st.DataObject) -> None:
    goal = data.draw(st.permutations(chosen))
    mix = MixSchedule(
        [MixEntry(0, tuple(apportion(ONE, chosen))), MixEntry(span, tuple(apportion(ONE, goal)), ramp=True)]
    )
    step = data.draw(st.integers(0, span + 1))
    assert sum(mix.shares(step)) == ONE
    assert min(mix.shares(step)) >= 0


def test_a_stage_holds_from_its_step_on() -> None:
    stages = Stages({0: 4096, 8000: 16384})
    assert [stages.sequence_length(step) for step in (0, 7999, 8000, 9000)] == [4096, 4096, 16384, 16384]
