"""The pacing model, without time: contenders, intervals, bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.format.ids import Epoch, Version
from stepfs.format.snapshot import LogState, ProducerState, genesis
from stepfs_producer.pace import (
    INTERVAL_S_MIN,
    LOAD,
    RECENT_MS,
    STRETCH_MAX,
    Pacer,
    ages,
    contenders,
    interval_s,
)


def middle(low: float, high: float) -> float:
    return (low + high) / 2


def head(
    last_versions: dict[str, int], *, version: int, time_ms: int = 0, times: dict[str, int] | None = None
) -> LogState:
    producers = {
        name: ProducerState(
            name, Epoch(1), b"i" * 16, 0, b"", False, Version(last), (times or {}).get(name, time_ms)
        )
        for name, last in last_versions.items()
    }
    return replace(genesis("0" * 32, 1), version=Version(version), producers=producers, time_ms=time_ms)


def paced(others: int, *, exposure_s: float = 0.01, delay_max_s: float = 5.0) -> Pacer:
    pacer = Pacer(delay_max_s=delay_max_s, draw=middle)
    pacer.others = others
    for _ in range(5):
        pacer.won(started_s=0.0, exposure_s=exposure_s)
    return pacer


@pytest.mark.parametrize("count", [0, 1, 2, 16, 64, 256])
def test_producers_in_turn_are_all_counted(count: int) -> None:
    assert contenders(range(count)) == count


def test_who_left_is_forgotten_after_a_few_rounds_of_the_rest() -> None:
    left, working = 60, 4
    gone_for = 3 * left
    assert contenders([*range(working), *range(gone_for, gone_for + left)]) == working


@given(st.lists(st.integers(0, 1000), max_size=300))
def test_never_more_than_there_are_and_never_fewer_by_one_more(found: list[int]) -> None:
    assert contenders(found) <= len(found)
    assert contenders([*found, 0]) >= contenders(found)


def test_retired_long_silent_and_oneself_do_not_count() -> None:
    state = head(
        {"me": 9, "a": 8, "b": 7, "old": 6, "bye": 5},
        version=9,
        time_ms=RECENT_MS * 2,
        times={"old": 1},
    )
    producers = dict(state.producers)
    producers["bye"] = replace(producers["bye"], retired=True)
    assert sorted(ages(replace(state, producers=producers), "me")) == [1, 2]


def test_one_producer_alone_is_held_back_by_the_price_of_a_version_only() -> None:
    assert paced(0).interval_s == INTERVAL_S_MIN
    assert paced(0).due_s(oldest_s=0.0, crowded=False) == INTERVAL_S_MIN


def test_the_interval_is_that_of_the_model() -> None:
    assert paced(15).interval_s == pytest.approx(interval_s(15, 0.01)) == pytest.approx(15 * 0.01 / LOAD)
    assert paced(15, exposure_s=0.02).interval_s == pytest.approx(2 * paced(15).interval_s)


def test_one_slow_answer_does_not_slow_the_pace() -> None:
    pacer = paced(15)
    before = pacer.interval_s
    pacer.won(started_s=0.0, exposure_s=4.0)
    assert pacer.interval_s == before


def test_hazard_09_nothing_waits_longer_than_the_hard_delay() -> None:
    pacer = paced(10_000, delay_max_s=2.0)
    assert pacer.defeated
    assert pacer.due_s(oldest_s=0.0, crowded=False) == 2.0


def test_a_crowded_window_is_committed_at_once() -> None:
    pacer = paced(64)
    assert pacer.due_s(oldest_s=100.0, crowded=False) > 0.0
    assert pacer.due_s(oldest_s=100.0, crowded=True) <= 0.0


def test_a_trickle_finds_the_pace_long_satisfied() -> None:
    assert paced(64).due_s(oldest_s=1000.0, crowded=False) < 1000.0


def test_of_two_exposures_the_shorter_is_believed() -> None:
    pacer = Pacer(delay_max_s=5.0, draw=middle)
    pacer.others = 3
    pacer.won(started_s=0.0, exposure_s=0.01)
    pacer.won(started_s=0.0, exposure_s=15.0)
    assert pacer.interval_s == pytest.approx(interval_s(3, 0.01))


def test_losses_push_back_and_wins_recover() -> None:
    pacer = paced(4)
    calm = pacer.interval_s
    pacer.lost(ended_s=10.0, exposure_s=0.01)
    assert pacer.interval_s == calm, "one loss is what the model expects"
    assert pacer.due_s(oldest_s=0.0, crowded=True) > 10.0, "not even a crowded window retries at once"
    for _ in range(50):
        pacer.lost(ended_s=10.0, exposure_s=0.01)
    assert calm < pacer.interval_s <= calm * STRETCH_MAX
    for _ in range(50):
        pacer.won(started_s=20.0, exposure_s=0.01)
    assert pacer.interval_s == pytest.approx(calm)


def test_racing_starts_are_pulled_apart_though_nobody_is_in_view() -> None:
    draws: list[tuple[float, float]] = []

    def draw(low: float, high: float) -> float:
        draws.append((low, high))
        return high

    pacer = Pacer(delay_max_s=5.0, draw=draw)
    pacer.lost(ended_s=1.0, exposure_s=0.01)
    assert pacer.due_s(oldest_s=0.0, crowded=True) > 1.0
    assert draws == [(0.0, pytest.approx(0.02))]


@given(
    st.integers(0, 300),
    st.floats(0.0, 10.0),
    st.floats(0.0, 10.0),
    st.lists(st.booleans(), max_size=40),
)
def test_due_is_bounded_whatever_happened(
    others: int, exposure_s: float, delay_max_s: float, wins: list[bool]
) -> None:
    pacer = Pacer(delay_max_s=delay_max_s, draw=lambda _low, high: high)
    pacer.others = others
    last_s = 0.0
    for number, won in enumerate(wins):
        last_s = float(number)
        if won:
            pacer.won(started_s=last_s, exposure_s=exposure_s)
        else:
            pacer.lost(ended_s=last_s, exposure_s=exposure_s)
    bound_s = max(last_s + max(pacer.interval_s, 2 * exposure_s), last_s + delay_max_s)
    assert pacer.due_s(oldest_s=last_s, crowded=False) <= bound_s * 1.2 + 1e-9
