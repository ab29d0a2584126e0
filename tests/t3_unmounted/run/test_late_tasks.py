"""Late tasks: another worker tries them as well, the first answer wins, and none of it is a death or shows in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import trio

from stepfs.errors import UsageError
from stepfs_producer.engine.tasks import (
    LATE_S_MIN,
    LATE_TIMES_MEAN,
    MachinesLostError,
    TaskRunner,
    WorkerDied,
    WorkersDiedError,
)

HANGS = float("inf")


def work() -> str:
    return "done"


class TimedEngine:
    """The n-th submission takes the n-th number of seconds, and answers with its number, or what `answers` says."""

    def __init__(self, seconds: Sequence[float], *, workers: int = 1, spares: int = 1, answers=None) -> None:
        self.seconds, self.workers, self.spares = list(seconds), workers, spares
        self.answers = answers or {}
        self.began: list[float] = []
        self.asked_at: list[int] = []
        self.ended: list[int] = []
        self.replaced = 0
        self.busiest = self._busy = 0

    async def submit(self, _function: Callable[..., object], *_arguments: object) -> object:
        number = len(self.began)
        self.began.append(trio.current_time())
        self._busy += 1
        self.busiest = max(self.busiest, self._busy)
        try:
            await trio.sleep(self.seconds[number])
        except trio.Cancelled:
            self.ended.append(number)
            raise
        finally:
            self._busy -= 1
        answer = self.answers.get(number, number)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def up(self) -> None:
        await trio.lowlevel.checkpoint()

    def warm_spare(self) -> None:
        self.replaced += 1

    async def end_stalled(self) -> None:
        self.asked_at.append(len(self.began))
        await trio.lowlevel.checkpoint()


def since(began_s: float) -> float:
    return round(trio.current_time() - began_s, 6)


@pytest.mark.parametrize(
    ("seconds", "answer", "took_s", "ended", "busiest"),
    [
        ([HANGS, 1], 1, LATE_S_MIN + 1, [0], 2),
        ([7, HANGS], 0, 7, [1], 2),
        ([HANGS, HANGS, HANGS, 1], 3, LATE_S_MIN * (1 + 2 + 4) + 1, [1, 2, 0], 2),
        # Never begun anew: each of the others had twice the time of the one before.
        ([1000] * 20, 0, 1000, [1, 2, 3, 4, 5, 6, 7], 2),
    ],
    ids=["another worker does it", "the first may still win", "a spare hangs as well", "a long task"],
)
async def test_the_first_answer_counts_and_every_other_try_ends(
    autojump_clock, seconds, answer, took_s, ended, busiest
) -> None:
    engine = TimedEngine(seconds)
    tasks = TaskRunner(engine, 600)
    began_s = trio.current_time()
    assert await tasks.carry_out("it", "code", work) == answer
    assert since(began_s) == took_s
    assert (engine.ended, engine.replaced, engine.busiest) == (ended, len(ended), busiest)
    assert (tasks.late, len(engine.began)) == (1, len(ended) + 1)


async def test_late_is_ten_times_the_mean_of_its_kind_and_source(autojump_clock) -> None:
    engine = TimedEngine([2, HANGS, 1, HANGS, 1])
    tasks = TaskRunner(engine, 600)
    await tasks.carry_out("it", "code", work)
    for source, late_s in (("code", 2 * LATE_TIMES_MEAN), ("prose", LATE_S_MIN)):
        began_s = trio.current_time()
        await tasks.carry_out("it", source, work)
        assert since(began_s) == late_s + 1


async def test_waiting_for_a_worker_is_not_late(autojump_clock) -> None:
    engine = TimedEngine([4] * 6)
    tasks = TaskRunner(engine, 600)
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(tasks.carry_out, "it", "code", work)
    assert (len(engine.began), tasks.late, engine.busiest) == (6, 0, 1)


async def test_second_tries_are_at_most_as_many_as_spares(autojump_clock) -> None:
    engine = TimedEngine([HANGS] * 4 + [9] * 4, workers=4, spares=2)
    tasks = TaskRunner(engine, 600)
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(tasks.carry_out, "it", "code", work)
    assert engine.busiest == 6
    assert since(began_s) == LATE_S_MIN + 18
    assert sorted(engine.ended) == [0, 1, 2, 3]


@pytest.mark.parametrize("seconds", [(6, 3), (9, 2)], ids=["the first dies", "the second dies"])
async def test_a_death_beside_another_try_costs_nothing(autojump_clock, seconds) -> None:
    first_dies = LATE_S_MIN + seconds[1] > seconds[0]
    dying = 0 if first_dies else 1
    engine = TimedEngine(seconds, answers={dying: WorkerDied("killed")})
    assert await TaskRunner(engine, 600).carry_out("it", "code", work) == 1 - dying
    assert (len(engine.began), engine.ended, engine.replaced) == (2, [], 0)


async def test_when_both_die_it_is_one_death_of_the_task(autojump_clock) -> None:
    died = {number: WorkerDied("killed") for number in range(4)}
    engine = TimedEngine([6, 3, 6, 3, 1], answers=died)
    assert await TaskRunner(engine, 600).carry_out("it", "code", work) == 4


@pytest.mark.parametrize(
    ("deaths", "ended_by"), [
        ("mmmmmmm", None), ("mmmwmmwm", None), ("mmwmmwmw", WorkersDiedError), ("mmmmwmwmmm", MachinesLostError),
    ],
)  # fmt: skip
async def test_a_lost_machine_is_not_charged_as_a_worker(autojump_clock, deaths: str, ended_by) -> None:
    """w: a worker died; m: its machine was lost."""
    died = {number: WorkerDied("killed", with_machine=one == "m") for number, one in enumerate(deaths)}
    engine = TimedEngine([1] * (len(deaths) + 1), answers=died)
    task = TaskRunner(engine, 600).carry_out("it", "code", work)
    if ended_by is None:
        assert await task == len(deaths)
    else:
        with pytest.raises(ended_by, match=r"^it: \d (workers|machines) .*\(killed\)"):
            await task
        assert len(engine.began) == len(deaths)


async def test_an_error_is_an_answer(autojump_clock) -> None:
    engine = TimedEngine([HANGS, 1], answers={1: UsageError("no such function")})
    with pytest.raises(UsageError, match="no such function"):
        await TaskRunner(engine, 600).carry_out("it", "code", work)
    assert engine.ended == [0]


async def test_a_run_that_ends_ends_both_tries(autojump_clock) -> None:
    engine = TimedEngine([HANGS, HANGS])
    with trio.move_on_after(2 * LATE_S_MIN):
        await TaskRunner(engine, 600).carry_out("it", "code", work)
    assert sorted(engine.ended) == [0, 1]
    assert engine.replaced == 0


async def test_idle_workers_have_to_answer_before_a_second_try(autojump_clock) -> None:
    """A spare that stands still since its last task would cost twice the patience: 15 s in all."""
    engine = TimedEngine([HANGS, HANGS, 1.0])
    assert await TaskRunner(engine, 600).carry_out("task", "", work) == 2
    assert engine.asked_at == [1, 2]
