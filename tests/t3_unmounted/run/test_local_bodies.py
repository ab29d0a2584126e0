"""Bodies of local workers: mapped and not copied, sealed, told when they are lost, and gone after any ending."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import trio
from test_local_engine import gone

from stepfs.errors import RefusedError
from stepfs_producer.engine.bodies import INLINE_BYTES_MAX
from stepfs_producer.engine.local import LocalEngine, local_engine
from stepfs_producer.engine.tasks import Kept, Lost, WorkerDied
from stepfs_producer.sources.record import Kind, Records

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
    data = np.arange(count, dtype="<i4").tobytes()
    return None, Records(Kind.TOKENS, data, ends, ends, ends, ends < 0, {1: "bad"}, b"\1" * count)


def whether_mapped(records: Records, first: int, last: int) -> tuple[bool, bytes, bytes]:
    part = records.part(first, last)
    assert isinstance(part.data, bytes)
    assert isinstance(part.mask, bytes)
    return isinstance(records.data, memoryview), part.data, part.mask


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
    assert (bytes(again.data), bytes(again.mask)) == (records.data, records.mask)
    assert again.bad == records.bad
    assert again.ends.tolist() == records.ends.tolist()


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


COMMAND = """
import os, sys, time, trio
sys.path[:0] = sys.argv[1].split(os.pathsep)
from stepfs_producer.engine.local import local_engine
from test_local_bodies import made, total

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
    script.write_text(COMMAND)
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
