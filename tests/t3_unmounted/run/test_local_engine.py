"""The engine of local processes: tasks, workers, and bodies that stay in them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from at_work import until

from stepfs.errors import RefusedError, UsageError
from stepfs_producer.engine import retry as failover
from stepfs_producer.engine.api import Kept, Lost, WorkerDied
from stepfs_producer.engine.local import LocalEngine, local_engine
from stepfs_producer.engine.retry import TaskRunner
from stepfs_producer.engine.shared_memory import INLINE_BYTES_MAX
from stepfs_producer.engine.worker import preload
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.sources.record import Kind, Records


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
    except (FileNotFoundError, ProcessLookupError):  # the latter as it goes
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


async def test_a_dead_worker_is_told_and_others_work_on(spawned) -> None:
    async with local_engine(1) as engine:
        assert isinstance(await engine.submit(end_this_worker), WorkerDied)
        assert engine.died == 1
        assert await engine.submit(square, 3) == 9


LOADED = """\
__import__("stepfs_producer.engine.worker").engine.worker.preload(".") or [
    name
    for name in ("stepfs_producer.transforms.records", "stepfs_producer.plan.model", "trio", "typer", "yaml")
    if name in __import__("sys").modules
]"""


async def test_a_worker_loads_what_its_tasks_need_and_neither_trio_nor_a_plan(spawned) -> None:
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


async def test_no_worker_is_left(spawned) -> None:
    pids = set()
    async with local_engine(2) as engine:
        for _ in range(4):
            pids.add(await engine.submit(worker))
    assert all(gone(pid) for pid in pids)


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


async def test_workers_that_come_up_slowly_are_not_joined_by_more_and_no_task_is_late(tmp_path, monkeypatch):
    monkeypatch.setattr(failover, "LATE_S_MIN", 0.05)
    up = tmp_path / "up"
    async with local_engine(2, preload=partial(wait_for, str(up))) as engine:
        tasks = TaskRunner(engine, 60)
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(tasks.carry_out, f"task {number}", "", square, number)
            await trio.sleep(1)  # twenty times as long as makes a task late
            assert len(multiprocessing.active_children()) <= engine.workers + engine.spares
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


LARGE = 1 << 20


def made(count: int) -> tuple[int, dict[str, object]]:
    numbers = np.arange(count, dtype=np.int64)
    return count, {"numbers": numbers, "text": "x" * 5, "odd": (numbers % 2).astype(np.uint8)}


def total(*bodies: dict) -> int:
    return sum(int(body["numbers"].sum()) + int(body["odd"].sum()) for body in bodies)


def expected(count: int) -> int:
    return count * (count - 1) // 2 + count // 2


def overwrite(body: dict) -> None:
    body["numbers"][0] = 1


def seals_hold(path: str) -> list[str]:
    found = []
    for flags in (os.O_RDWR, os.O_RDWR | os.O_TRUNC):
        try:
            os.write(os.open(path, flags), b"x")
        except PermissionError as error:
            found.append(str(error.errno))
    return found


def die_with(body: dict) -> tuple[int, dict]:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0, body


def records_of(count: int) -> tuple[None, Records]:
    ends = np.arange(1, count + 1, dtype=np.int64) * 4
    data = Ragged(np.arange(count, dtype="<i4").view(np.uint8), ends)
    return None, Records(Kind.TOKENS, data, ends, ends, ends < 0, {1: "bad"}, np.ones(count, np.uint8))


def whether_mapped(records: Records, first: int, last: int) -> tuple[bool, bytes, bytes]:
    part = records.part(first, last)
    assert part.mask is not None
    return not records.data.values.flags.writeable, part.data.values.tobytes(), part.mask.tobytes()


def file_limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def files_open(pid: int | str = "self") -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = str(entry.readlink())
        except FileNotFoundError:
            continue
        found += [name] if name.startswith("/memfd:stepfs-") else []
    return found


async def keep(engine: LocalEngine, count: int) -> Kept:
    found = await engine.keep(made, count)
    assert isinstance(found, Kept)
    return found


@pytest.mark.parametrize("count", [0, 10, LARGE], ids=["empty", "small", "large"])
async def test_a_body_stays_and_is_given_to_any_worker(count) -> None:
    async with local_engine(2) as engine:
        one, two = await keep(engine, count), await keep(engine, count + 1)
        assert one.head == count
        assert one.reference.nbytes >= 9 * count
        assert len(files_open()) == 2 * (9 * count > INLINE_BYTES_MAX)
        assert engine.kept_bytes == one.reference.nbytes + two.reference.nbytes
        both = expected(count) + expected(count + 1)
        for _ in range(3):
            assert await engine.submit(total, one.reference, two.reference) == both
        engine.release(one.reference)
        assert await engine.submit(total, one.reference) == Lost((one.reference,))
        assert await engine.submit(total, two.reference) == expected(count + 1)
    assert not files_open()


async def test_bytes_of_records_are_mapped_too() -> None:
    async with local_engine(1) as engine:
        kept = await engine.keep(records_of, LARGE)
        assert isinstance(kept, Kept)
        mapped, data, mask = await engine.submit(whether_mapped, kept.reference, 5, 7)
        assert mapped
        assert np.frombuffer(data, "<i4").tolist() == [5, 6]
        assert mask == b"\1\1"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_records_are_pickled_by_any_protocol(protocol) -> None:
    records = records_of(3)[1]
    again = pickle.loads(pickle.dumps(records, protocol))
    assert (again.data.values.tobytes(), again.mask.tobytes()) == (
        records.data.values.tobytes(),
        records.mask.tobytes(),
    )
    assert again.bad == records.bad
    assert again.data.ends.tolist() == records.data.ends.tolist()


async def test_a_body_does_not_change() -> None:
    async with local_engine(1) as engine:
        kept = await keep(engine, LARGE)
        with pytest.raises(ValueError, match="read-only"):
            await engine.submit(overwrite, kept.reference)
        path = kept.reference.stored.file.path  # type: ignore[attr-defined]
        assert await engine.submit(seals_hold, path) == ["1", "1"]
        assert await engine.submit(total, kept.reference) == expected(LARGE)


async def test_another_file_of_the_same_number_is_not_taken_for_it() -> None:
    async with local_engine(1) as engine:
        kept, other = await keep(engine, LARGE), await keep(engine, LARGE + 1)
        os.dup2(other.reference.descriptor, kept.reference.descriptor)  # type: ignore[attr-defined]
        assert await engine.submit(total, other.reference, kept.reference) == Lost((kept.reference,))


async def test_a_worker_that_dies_leaves_no_file() -> None:
    async with local_engine(1) as engine:
        kept = await keep(engine, LARGE)
        assert isinstance(await engine.keep(die_with, kept.reference), WorkerDied)
        assert len(files_open()) == 1
        with trio.move_on_after(0.2):
            await engine.keep(time.sleep, 600)
        assert len(files_open()) == 1
        assert await engine.submit(total, kept.reference) == expected(LARGE)


async def test_bodies_return_when_no_more_files_may_be_open(monkeypatch) -> None:
    monkeypatch.setattr("stepfs_producer.engine.local._FILES_MAX", 4)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    async with local_engine(1) as engine:
        kept = [await keep(engine, LARGE) for _ in range(4)]
        assert len(files_open()) == 2
        assert await engine.submit(total, *(one.reference for one in kept)) == 4 * expected(LARGE)


async def test_memory_that_is_full_is_one_line() -> None:
    async with local_engine(1) as engine:
        await engine.submit(file_limit, 1 << 20)
        with pytest.raises(RefusedError, match=r"find no room in memory .*; give less with --memory") as caught:
            await engine.keep(made, LARGE)
        assert "\n" not in str(caught.value)
        assert not files_open()


BODY_COMMAND = """
import os, sys, time, trio
sys.path[:0] = sys.argv[1].split(os.pathsep)
from stepfs_producer.engine.local import local_engine
from test_local_engine import made, total

async def main():
    async with local_engine(2) as engine:
        await engine.warm()
        kept = [await engine.keep(made, 1 << 20) for _ in range(3)]
        print(*[await engine.submit(os.getpid) for _ in range(2)], flush=True)
        await engine.submit(total_and_wait, kept[0].reference)

def total_and_wait(body):
    total(body)
    print("busy", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    trio.run(main)
"""


def test_nothing_is_left_of_a_command_that_was_killed(tmp_path) -> None:
    script = tmp_path / "command.py"
    script.write_text(BODY_COMMAND)
    in_storage = set(Path("/dev/shm").iterdir())
    paths = os.pathsep.join(sys.path)
    with subprocess.Popen([sys.executable, script, paths], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        pids = {int(pid) for pid in command.stdout.readline().split()}
        assert command.stdout.readline() == "busy\n"
        assert len(files_open(command.pid)) == 3
        command.kill()
    deadline = time.monotonic() + 60
    while not all(gone(pid) for pid in pids):  # nobody has the files open any more
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not {one.name for one in set(Path("/dev/shm").iterdir()) - in_storage if "stepfs" in one.name}
