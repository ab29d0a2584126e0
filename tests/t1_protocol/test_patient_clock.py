"""Virtual time and worker threads: how long a thread takes must not decide what a test sees."""

from __future__ import annotations

import time

import trio
from trio.testing import MockClock


async def test_virtual_time_stands_still_while_a_thread_works(patient_clock: MockClock) -> None:
    with trio.move_on_after(1000) as deadline:
        await trio.to_thread.run_sync(time.sleep, 0.1)
        assert trio.current_time() == 0
        await trio.sleep(999)
        await trio.to_thread.run_sync(time.sleep, 0.1)
        assert trio.current_time() == 999
    assert not deadline.cancelled_caught


async def test_it_stands_still_until_the_last_of_several_has_ended(patient_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, time.sleep, 0.05)
        nursery.start_soon(trio.to_thread.run_sync, time.sleep, 0.2)
    assert trio.current_time() == 0
