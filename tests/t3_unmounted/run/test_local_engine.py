"""Worker processes: a killed one costs its own task, none outlives the command, and none is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from at_work import until

from stepfs.errors import UsageError
from stepfs_producer.engine import tasks as failover
from stepfs_producer.engine.local import local_engine
from stepfs_producer.engine.tasks import TaskRunner, WorkerDied
from stepfs_producer.engine.worker import preload


def square(number: int) -> int:
    return number * number


def refuse(text: str) -> None:
    raise UsageError(text)


def end_this_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def worker() -> int:
    return os.getpid()


def gone(pid: int) -> bool:
    """Ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_results_and_errors_come_back_to_who_submitted() -> None:
    async with local_engine(2) as engine:
        results = {}

        async def one(number: int) -> None:
            results[number] = await engine.submit(square, number)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(one, number)
        assert results == {number: number * number for number in range(3)}
        with pytest.raises(UsageError, match="not so"):
            await engine.submit(refuse, "not so")


async def test_a_dead_worker_is_told_and_others_work_on() -> None:
    async with local_engine(1) as engine:
        assert isinstance(await engine.submit(end_this_worker), WorkerDied)
        assert engine.died == 1
        assert await engine.submit(square, 3) == 9


async def test_an_idle_worker_that_was_killed_costs_at_most_the_next_task() -> None:
    async with local_engine(1) as engine:
        pid = await engine.submit(worker)
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)
        if isinstance(await engine.submit(square, 4), WorkerDied):
            assert await engine.submit(square, 4) == 16


LOADED = """\
__import__("stepfs_producer.engine.worker").engine.worker.preload(".") or [
    name for name in ("stepfs_producer.transforms.records", "trio", "typer") if name in __import__("sys").modules
]"""


async def test_a_worker_loads_what_its_tasks_need_and_no_trio() -> None:
    async with local_engine(1, preload=partial(preload, ".")) as engine:
        assert await engine.submit(eval, LOADED) == ["stepfs_producer.transforms.records"]


def stop_the_first_worker(path: str) -> int:
    """The first one stops; only a signal could wake it up."""
    mine = Path(f"{path}.{os.getpid()}")
    mine.write_text(str(os.getpid()))
    with suppress(FileExistsError):
        Path(path).hardlink_to(mine)  # name and content at once: a spare may look at any moment
        os.kill(os.getpid(), signal.SIGSTOP)
    return os.getpid()


async def test_a_stopped_worker_is_ended_as_soon_as_a_spare_has_its_result(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(failover, "LATE_S_MIN", 0.2)
    noted = tmp_path / "stopped"
    async with local_engine(1) as engine:
        await engine.warm()
        tasks = TaskRunner(engine, 60)
        spare = await tasks.carry_out("stops", "", stop_the_first_worker, str(noted))
        stopped = int(noted.read_text())
        assert spare != stopped
        assert gone(stopped)
        assert (tasks.late, engine.died) == (1, 0)
        await until(lambda: engine.idle >= engine.workers + engine.spares)


async def test_their_number_may_change() -> None:
    async with local_engine(1) as engine:
        await engine.warm()
        for count, up in ((9, 11), (2, 3)):
            engine.workers = count
            with trio.fail_after(60):
                while engine.idle != up:
                    await trio.sleep(0.02)
                    assert engine.idle <= 11
        assert (await engine.submit(square, 3), engine.died) == (9, 0)


async def test_no_worker_is_left() -> None:
    pids = set()
    async with local_engine(2) as engine:
        for _ in range(4):
            pids.add(await engine.submit(worker))
    assert all(gone(pid) for pid in pids)


COMMAND = """
import os, sys, time, trio
sys.path.insert(0, sys.argv[1])
from stepfs_producer.engine.local import local_engine

async def main():
    async with local_engine(2) as engine:
        pid = await engine.submit(os.getpid)
        print(pid, flush=True)
        await trio.sleep(PAUSE)
        print(await engine.submit(os.getpid), flush=True)
        await engine.submit(time.sleep, 600)

if __name__ == "__main__":
    trio.run(main)
"""


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_no_worker_outlives_a_command_that_was_killed(tmp_path, busy) -> None:
    script = tmp_path / "command.py"
    script.write_text(COMMAND.replace("PAUSE", "0" if busy else "600"))
    with subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        pid = int(command.stdout.readline())
        if busy:
            assert int(command.stdout.readline())
        command.kill()
    deadline = time.monotonic() + 30
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_an_idle_worker_that_was_killed_does_not_hide_the_error_that_ended_the_run() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with local_engine(1) as engine, trio.open_nursery():
            pid = await engine.submit(worker)
            assert isinstance(pid, int)
            os.kill(pid, signal.SIGKILL)
            while not gone(pid):
                pass
            raise KeyboardInterrupt
    assert caught.group_contains(KeyboardInterrupt)


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.02)


def workers_of_this_process() -> int:
    """Running or starting."""
    children = [pid for listed in Path("/proc/self/task").glob("*/children") for pid in listed.read_text().split()]
    return sum(b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)


async def test_workers_that_come_up_slowly_are_not_joined_by_more_and_no_task_is_late(tmp_path, monkeypatch):
    monkeypatch.setattr(failover, "LATE_S_MIN", 0.05)
    up = tmp_path / "up"
    before = workers_of_this_process()
    async with local_engine(2, preload=partial(wait_for, str(up))) as engine:
        tasks = TaskRunner(engine, 60)
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(tasks.carry_out, f"task {number}", "", square, number)
            await trio.sleep(1)  # twenty times as long as makes a task late
            assert workers_of_this_process() - before <= engine.workers + engine.spares
            assert tasks.late == 0
            up.touch()
        assert engine.died == 0


async def test_a_task_does_not_wait_for_workers_that_died_at_their_start() -> None:
    async with local_engine(1, preload=end_this_worker) as engine:
        tasks = TaskRunner(engine, 60)
        with trio.fail_after(60):
            assert await tasks.carry_out("a task", "", square, 3) == 9


async def test_an_idle_worker_that_stands_still_is_ended_before_it_gets_a_task() -> None:
    async with local_engine(2) as engine:
        with trio.fail_after(100):
            while engine.idle < 3:  # noqa: ASYNC110 - the engine has no event for it
                await trio.sleep(0.01)
            pids = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
            os.kill(pids[-1], signal.SIGSTOP)
            await engine.end_stalled()
            assert gone(pids[-1])
            assert await engine.submit(square, 3) == 9
        assert engine.died == 0, "nothing was lost with it"
