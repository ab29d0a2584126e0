"""trio's clock for a daemon that may be suspended."""

from __future__ import annotations

import pytest
import trio

from stepfs.mount.health.suspend_clock import RunningTime


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
