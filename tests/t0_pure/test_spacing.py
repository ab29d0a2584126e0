"""How often one mount of many asks, and trio's clock for a daemon that may be suspended."""

from __future__ import annotations

from statistics import fmean

import pytest
import trio

from stepfs.follow.follower import MOUNTS_MIN, SLOWER_MAX, Spacing
from stepfs.mount.health.watchdog import RunningTime


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
