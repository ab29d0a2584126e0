"""The pacing model, without time: contenders, intervals, bounds."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from stepfs.follow.polling import MOUNTS_MIN, SLOWER_MAX, Spacing
from stepfs.format.ids import Epoch, Version
from stepfs.format.snapshot import LogState, ProducerState, genesis
from stepfs.lake.log.append import ASKS_EVERY_S, PAUSE_S, Pauses
from stepfs.mount.daemon.watchdog import RunningTime
from stepfs_producer.commit.pace import (
    CROWDED_SHARE_MIN,
    INTERVAL_S_MIN,
    LOAD,
    RECENT_MS,
    TURNS_MAX,
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
        name: ProducerState(name, Epoch(1), b"i" * 16, 0, b"", False, Version(last), (times or {}).get(name, time_ms))
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
        {"me": 9, "a": 8, "b": 7, "old": 6, "bye": 5}, version=9, time_ms=RECENT_MS * 2, times={"old": 1},
    )  # fmt: skip
    producers = dict(state.producers)
    producers["bye"] = replace(producers["bye"], retired=True)
    assert sorted(ages(replace(state, producers=producers), "me")) == [1, 2]


def test_one_producer_alone_is_held_back_by_the_price_of_a_version_only() -> None:
    assert paced(0).interval_s == INTERVAL_S_MIN
    assert paced(0).due_s(now_s=0.0, oldest_s=0.0, crowded=False) == INTERVAL_S_MIN


def test_the_interval_is_that_of_the_model() -> None:
    assert paced(15).interval_s == pytest.approx(interval_s(15, 0.01)) == pytest.approx(15 * 0.01 / LOAD)
    assert paced(15, exposure_s=0.02).interval_s == pytest.approx(2 * paced(15).interval_s)


def test_one_slow_answer_does_not_slow_the_pace() -> None:
    pacer = paced(15)
    before = pacer.interval_s
    pacer.won(started_s=0.0, exposure_s=4.0)
    assert pacer.interval_s == before


def test_hazard_09_a_bound_that_the_log_affords_is_kept() -> None:
    pacer = paced(15, delay_max_s=2.0)
    assert not pacer.gives_way
    pacer._jitter = 10.0  # whatever the draw
    assert pacer.due_s(now_s=0.0, oldest_s=0.0, crowded=False) == 2.0


def test_a_bound_shorter_than_the_pace_gives_way_to_it() -> None:
    pacer = paced(100, exposure_s=0.05, delay_max_s=5.0)
    assert pacer.gives_way
    assert pacer.pacing.gives_way
    assert pacer.due_s(now_s=0.0, oldest_s=0.0, crowded=False) == pytest.approx(100 * 0.05 / LOAD)


def test_a_crowded_window_is_committed_early_while_the_log_has_load_to_spare() -> None:
    pacer = paced(64)
    usual_s = pacer.due_s(now_s=0.0, oldest_s=0.0, crowded=False)
    assert pacer.due_s(now_s=0.0, oldest_s=0.0, crowded=True) == pytest.approx(CROWDED_SHARE_MIN * usual_s)


def test_no_crowded_window_is_committed_early_on_a_log_that_is_busy() -> None:
    pacer = paced(64)
    pacer.note(0.0, 0, 64, 0)
    pacer.note(10.0, round(10.0 * LOAD / 0.01), 64, None)
    usual_s = pacer.due_s(now_s=0.0, oldest_s=0.0, crowded=False)
    assert pacer.due_s(now_s=0.0, oldest_s=0.0, crowded=True) == usual_s


def test_a_trickle_finds_the_pace_long_satisfied() -> None:
    assert paced(64).due_s(now_s=0.0, oldest_s=1000.0, crowded=False) < 1000.0


def test_of_two_exposures_the_shorter_is_believed() -> None:
    pacer = Pacer(delay_max_s=5.0, draw=middle)
    pacer.others = 3
    pacer.won(started_s=0.0, exposure_s=0.01)
    pacer.won(started_s=0.0, exposure_s=15.0)
    assert pacer.interval_s == pytest.approx(interval_s(3, 0.01))


def test_an_outage_is_forgotten_after_two_attempts_and_never_lasts_longer_in_the_pace_than_in_the_store():
    pacer = paced(100, exposure_s=0.05)
    waited_s, outage_s, usual_s = 0.0, 600.0, pacer.interval_s
    while waited_s < outage_s:
        pacer.won(started_s=waited_s, exposure_s=15.0)
        waited_s += pacer.interval_s
    assert usual_s < pacer.interval_s < 2 * outage_s
    for _ in range(2):
        pacer.won(started_s=waited_s, exposure_s=0.05)
    assert pacer.interval_s == pytest.approx(usual_s)


def test_a_first_exposure_of_nothing_does_not_stay() -> None:
    pacer = paced(15, exposure_s=0.0)
    for _ in range(40):
        pacer.won(started_s=0.0, exposure_s=0.01)
    assert pacer.interval_s == pytest.approx(interval_s(15, 0.01))


def test_a_start_that_was_frozen_for_minutes_waits_for_a_minute_and_not_for_hours() -> None:
    """Seeds 91022433 and 91026877: fourteen others, and an answer that came when the process went on."""
    pacer = Pacer(delay_max_s=0.0, draw=middle)
    pacer.others = 14
    pacer.won(started_s=0.0, exposure_s=300.0)
    assert pacer.due_s(now_s=300.0, oldest_s=300.0, crowded=False) < 400.0
    pacer.won(started_s=300.0, exposure_s=0.01)
    assert pacer.interval_s == pytest.approx(interval_s(14, 0.01))


def test_a_long_pace_does_not_hide_the_others() -> None:
    """1,000 producers at 50 ms commit every 250 s: who committed a minute ago is still one of them."""
    state = head({"me": 1000, **{f"p{n}": n for n in range(1000)}}, version=1000, time_ms=250_000)
    producers = {name: replace(producer, time_ms=producer.version * 250) for name, producer in state.producers.items()}
    pacer = paced(0, exposure_s=0.05)
    for _ in range(5):
        pacer.note_head(replace(state, producers=producers), "me", 0.0, pauses_asked=0)
    assert pacer.others == 1000


def test_losses_push_back_and_leave_the_pace_alone() -> None:
    pacer = paced(4)
    calm = pacer.interval_s
    for _ in range(50):
        pacer.lost(ended_s=10.0, exposure_s=0.01)
        assert 10.0 < pacer.due_s(now_s=0.0, oldest_s=0.0, crowded=True) <= 10.0 + calm
    assert pacer.interval_s == calm


def test_an_overdue_loser_retries_sooner_than_one_whose_turn_is_to_come() -> None:
    def retry_s(age: int) -> float:
        pacer = Pacer(delay_max_s=5.0, draw=lambda _low, high: high)
        pacer.note(0.0, 0, 99, 0)
        pacer.note(0.0, age, 99, 0)
        for _ in range(12):
            pacer.lost(ended_s=0.0, exposure_s=0.05)
        return pacer.due_s(now_s=0.0, oldest_s=0.0, crowded=False)

    assert retry_s(50) == retry_s(100) == pytest.approx(interval_s(99, 0.05))
    assert retry_s(200) == pytest.approx(retry_s(100) / 4)
    assert retry_s(900) == pytest.approx(retry_s(100) / 81)


def test_a_producer_far_away_tries_about_as_often_as_the_others() -> None:
    pacer = paced(99, exposure_s=0.5)
    pacer.note(0.0, 0, 99, 0)
    pacer.note(25.0, 100, 99, 100)
    assert pacer.interval_s == pytest.approx(TURNS_MAX * 25.0)


def test_pauses_after_losses_double_from_four_exposures_up_to_the_interval() -> None:
    draws: list[float] = []

    def draw(_low: float, high: float) -> float:
        draws.append(high)
        return high

    pacer = Pacer(delay_max_s=5.0, draw=draw)
    pacer.others = 99
    for _ in range(9):
        pacer.lost(ended_s=0.0, exposure_s=0.01)
    assert draws == pytest.approx([0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 99 * 0.01 / LOAD, 99 * 0.01 / LOAD])


@pytest.mark.parametrize(("age", "is_locked_out"), [(19, False), (20, True)])
def test_who_loses_after_two_turns_tries_in_a_pause_until_it_wins(age: int, is_locked_out: bool) -> None:
    pacer = Pacer(delay_max_s=5.0, draw=lambda _low, high: high)
    pacer.note(0.0, 0, 9, 0)
    pacer.note(29.0, age, 9, 0)
    pacer.pauses.note(0.0, 4)
    pacer.lost(ended_s=29.0, exposure_s=2.0)
    assert pacer.is_locked_out is is_locked_out
    pacer.pauses.note(30.0, 5)
    assert (pacer.due_s(now_s=31.0, oldest_s=0.0, crowded=False) == 31.0) is is_locked_out
    pacer.won(started_s=31.0, exposure_s=0.001)
    assert pacer.due_s(now_s=31.5, oldest_s=0.0, crowded=False) >= 30.0 + PAUSE_S, "the rest is others'"


def test_what_a_new_writer_finds_on_record_is_over() -> None:
    pauses = Pauses()
    pauses.note(100.0, 7)
    assert pauses.kept_s(100.0) == 100.0
    assert pauses.may_ask(100.0)


def test_a_pause_begins_where_it_is_seen_and_shifts_all_that_was_due_in_it() -> None:
    pauses = Pauses()
    pauses.note(90.0, 7)
    pauses.note(100.0, 8)
    assert pauses.is_open(100.0)
    assert not pauses.is_open(100.0 + PAUSE_S)
    assert pauses.kept_s(101.0) == 100.0 + PAUSE_S
    assert pauses.after_s(99.0, 0.5) == 99.5
    assert pauses.after_s(99.0, 2.0) == 101.0 + PAUSE_S
    assert pauses.after_s(101.0, 2.0) == 102.0 + PAUSE_S
    assert pauses.after_s(100.0 + PAUSE_S, 2.0) == 102.0 + PAUSE_S
    assert pauses.after_s(float("-inf"), 2.0) == float("-inf")


def test_requests_that_come_too_often_are_not_heard() -> None:
    pauses = Pauses()
    for count, now_s in enumerate(range(100)):
        pauses.note(float(now_s), count)
    silent = [now_s for now_s in range(100) if Pauses.is_open(pauses, float(now_s))]
    assert len(silent) <= PAUSE_S
    assert pauses.may_ask(max(silent) + ASKS_EVERY_S)


def test_racing_starts_are_pulled_apart_though_nobody_is_in_view() -> None:
    draws: list[tuple[float, float]] = []

    def draw(low: float, high: float) -> float:
        draws.append((low, high))
        return high

    pacer = Pacer(delay_max_s=5.0, draw=draw)
    pacer.lost(ended_s=1.0, exposure_s=0.01)
    assert pacer.due_s(now_s=0.0, oldest_s=0.0, crowded=True) > 1.0
    assert draws == [(0.0, pytest.approx(0.02))]


@given(st.integers(0, 300), st.floats(0.0, 10.0), st.floats(0.0, 10.0), st.lists(st.booleans(), max_size=40))
def test_due_is_bounded_whatever_happened(others, exposure_s, delay_max_s, wins):
    pacer = Pacer(delay_max_s=delay_max_s, draw=lambda _low, high: high)
    last_s = 0.0
    for number, won in enumerate(wins):
        last_s = float(number)
        pacer.note(last_s, number, others, None)
        if won:
            pacer.won(started_s=last_s, exposure_s=exposure_s)
        else:
            pacer.lost(ended_s=last_s, exposure_s=exposure_s)
    waited_s = pacer.due_s(now_s=0.0, oldest_s=last_s, crowded=False) - last_s
    if pacer.losses:
        assert waited_s <= max(pacer.interval_s, 2 * exposure_s) + 1e-6
    else:
        assert waited_s <= max(delay_max_s, 1.15 * pacer.interval_s) + 1e-6


@pytest.mark.parametrize("nodes", [0, 1, 50, MOUNTS_MIN - 1])
def test_below_a_hundred_mounts_every_interval_is_exactly_the_usual_one(nodes: int) -> None:
    pace = Spacing(nodes)
    for usual_s in (0.01, 0.1, 2.0, 30.0):
        assert pace.poll_s(usual_s) == usual_s
        assert pace.group_look_s(usual_s) == usual_s


@pytest.mark.parametrize("nodes", [100, 200, 1000, 20_000])
def test_the_intervals_grow_with_the_number_and_are_never_shorter(nodes: int) -> None:
    pace = Spacing(nodes)
    polls = [pace.poll_s(0.1) for _ in range(1000)]
    looks = [pace.group_look_s(1.0) for _ in range(1000)]
    assert min(polls) >= nodes / 1000
    assert min(looks) >= max(1.0, nodes / 200)
    for intervals in (polls, looks):
        assert max(intervals) <= 2 * min(intervals)
        assert len(set(intervals)) > 900  # mounts that began together drift apart


def test_waiting_mounts_of_any_number_ask_less_than_a_thousand_times_a_second_together() -> None:
    for nodes in (100, 300, 1000, 5000):
        pace = Spacing(nodes)
        assert nodes / fmean(pace.poll_s(0.1) for _ in range(2000)) < 900


def test_an_idle_interval_longer_than_the_fleets_stays_as_it_is_but_for_a_tenth() -> None:
    pace = Spacing(1000)
    assert all(2.0 <= pace.poll_s(2.0) <= 2.2 for _ in range(1000))


def test_a_store_that_throttles_makes_everything_slower_in_a_fleet_of_any_size() -> None:
    throttled = 0
    pace = Spacing(throttled=lambda: throttled)
    for expected in (2.0, 4.0, SLOWER_MAX, SLOWER_MAX):
        throttled += 3
        pace.note_look()
        assert pace.poll_s(0.1) == pytest.approx(0.1 * expected)
        assert pace.group_look_s(1.0) == pytest.approx(expected)
    for _ in range(30):
        pace.note_look()
    assert pace.poll_s(0.1) == 0.1


class Machine:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_it_passes_like_the_machines_while_somebody_looks():
    machine = Machine()
    clock = RunningTime(15.0, monotonic=machine)
    begin = clock.current_time()
    for _ in range(100):
        machine.now += 10.0
        clock.current_time()
    assert clock.current_time() - begin == pytest.approx(1000.0)


def test_a_suspension_takes_no_more_than_the_longest_silence():
    machine = Machine()
    clock = RunningTime(15.0, monotonic=machine)
    deadline = clock.current_time() + 300.0
    machine.now += 7200.0
    assert clock.deadline_to_sleep_time(deadline) == pytest.approx(285.0)
    machine.now += 1.0
    assert clock.deadline_to_sleep_time(deadline) == pytest.approx(284.0)


def test_trio_runs_on_it():
    async def sleep():
        with trio.move_on_after(0.05) as scope:
            await trio.sleep_forever()
        return scope.cancelled_caught

    assert trio.run(sleep, clock=RunningTime())
