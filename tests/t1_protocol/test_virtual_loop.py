"""The loop of virtual time against trio's own, and beside worker threads: the same times in the same order."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext

import deterministic
import pytest
import trio
from deterministic import run_seeded
from trio.testing import MockClock
from virtual_loop import pause

Story = list[tuple[float, str]]

_SHORT_S = (0.0, 0.25, 0.5, 0.5, 1.0)  # so that much ends at the same moment


class _Crowd:
    """Tasks that wait in every way that stepfs knows, for each other too, and note when they come to what."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.story: Story = []
        self.events: list[trio.Event] = []

    def note(self, what: str) -> None:
        self.story.append((trio.current_time(), what))

    def seconds(self) -> float:
        return self.rng.choice((*_SHORT_S, self.rng.uniform(0.0, 2.0)))

    async def main(self) -> Story:
        self.events = [trio.Event() for _ in range(6)]
        send, receive = trio.open_memory_channel[int](2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reader, receive)
            async with trio.open_nursery() as workers:
                for number in range(6):
                    workers.start_soon(self.worker, number, send)
            send.close()
        return self.story

    async def reader(self, receive: trio.MemoryReceiveChannel[int]) -> None:
        async for number in receive:
            self.note(f"heard {number}")
            await trio.sleep(self.seconds())

    async def worker(self, number: int, send: trio.MemorySendChannel[int]) -> None:
        for turn in range(8):
            await self.wait(number, send)
            self.note(f"{number} after {turn}")
        self.events[number].set()

    async def wait(self, number: int, send: trio.MemorySendChannel[int]) -> None:
        match self.rng.randrange(8):
            case 0 | 1:
                await trio.sleep(self.seconds())
            case 2:
                with trio.move_on_after(self.seconds()):
                    await pause(self.rng.uniform(0.01, 2.0))
            case 3:
                await trio.lowlevel.checkpoint()
            case 4:
                await send.send(number)
            case 5:
                with trio.move_on_after(self.seconds()) as scope:
                    await self.rng.choice(self.events).wait()
                self.note(f"{number} gave up: {scope.cancelled_caught}")
            case 6:
                with trio.move_on_after(self.seconds()) as scope:
                    await trio.sleep(self.seconds())
                self.note(f"{number} was cut short: {scope.cancelled_caught}")
            case _:
                await self.family(number)

    async def family(self, number: int) -> None:
        async def child(name: int, scope: trio.CancelScope) -> None:
            try:
                await trio.sleep(self.seconds())
                self.note(f"child {name} of {number}")
                if self.rng.random() < 0.3:
                    scope.cancel()
                await trio.sleep(self.seconds())
            finally:
                self.note(f"child {name} of {number} ends")

        async with trio.open_nursery() as nursery:
            for name in range(3):
                nursery.start_soon(child, name, nursery.cancel_scope)


def _stories(seeds: range) -> list[Story]:
    return [run_seeded(_Crowd(seed).main, seed=seed) for seed in seeds]


def test_tasks_meet_in_the_order_that_trios_own_loop_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = _stories(range(100))
    monkeypatch.setattr(deterministic, "virtual_loop", nullcontext)
    assert cheap == _stories(range(100))
    assert len({len(story) for story in cheap}) > 10, "the seeds tell different stories"


def test_threads_are_served_when_nothing_else_is_due() -> None:
    async def main() -> tuple[int, float]:
        return await trio.to_thread.run_sync(lambda: 7), trio.current_time()

    assert run_seeded(main, seed=0) == (7, 0.0)


def test_an_error_ends_the_run_as_in_trio() -> None:
    async def fail() -> None:
        await trio.sleep(1)
        raise KeyError("x")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(fail)

    with pytest.raises(ExceptionGroup) as caught:
        run_seeded(main, seed=0)
    assert isinstance(caught.value.exceptions[0], KeyError)


def test_a_sleep_of_negative_length_is_refused_and_one_without_end_is_cancelled() -> None:
    async def main() -> float:
        with pytest.raises(ValueError, match="non-negative"):
            await trio.sleep(-1)
        with trio.move_on_after(5):
            await trio.sleep(float("inf"))
        return trio.current_time()

    assert run_seeded(main, seed=0) == 5.0


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
