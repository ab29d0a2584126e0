"""`Lake` across processes: forks at bad moments, spawn, the end of the interpreter, and no pyfuse3 anywhere."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
from finished import ran
from shelf import SMALL, commit_on_disk, lake_on_disk, payload

from stepfs import Lake, background
from stepfs.lake.log.reader import LogReader

STEPS = 6
WAIT_S = 30


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A lake that no test changes."""
    url = (tmp_path_factory.mktemp("lakes") / "lake").as_uri()
    lake_on_disk(url)
    commit_on_disk(url, range(STEPS))
    return url


def in_child(function) -> int:
    """Forks; the child's exit code: 0 if `function()` was true. A child that hangs is killed by its own alarm."""
    pid = os.fork()
    if not pid:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(WAIT_S)
            os._exit(0 if function() else 1)
        except BaseException as error:  # noqa: BLE001
            sys.stderr.write(f"{error!r}\n")
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reads_all(lake: Lake) -> bool:
    return all(lake[step][rank] == payload(step, rank, SMALL) for step in range(STEPS) for rank in (0, 1))


def test_a_child_of_a_fork_opens_the_lake_for_itself_and_leaves_the_parents_alone(url):
    with Lake(url) as lake:
        view = lake[1][1]
        parents = lake._running()

        def child() -> bool:
            mine = lake._running()
            assert mine is not parents
            assert not parents.is_here
            assert view == payload(1, 1, SMALL)
            parents.stop()  # of no effect, and does not hang
            grandchild = in_child(lambda: lake._running() is not mine and reads_all(lake))
            lake_here = reads_all(lake)
            lake.close()
            names = [thread.name for thread in threading.enumerate()]
            return lake_here and grandchild == 0 and not any(name.startswith("stepfs-reader") for name in names)

        assert in_child(child) == 0
        assert lake._running() is parents
        assert reads_all(lake)


def test_a_fork_in_the_middle_of_fetches_harms_neither_side(url):
    with Lake(url) as lake:
        ended = threading.Event()
        wrong: list[object] = []

        def read_on() -> None:
            while not ended.is_set():
                try:
                    wrong.extend([] if reads_all(lake) else ["bytes"])
                except Exception as error:  # noqa: BLE001
                    wrong.append(error)

        threads = [threading.Thread(target=read_on) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            assert [in_child(lambda: reads_all(lake)) for _ in range(8)] == [0] * 8
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert not wrong


def test_a_fork_while_another_thread_holds_the_lock_of_opening(url):
    lake = Lake(url)
    lake.rest()
    lock = lake._locks[background.generation()]
    with lock:  # as a thread that opens the lake at this moment
        assert in_child(lambda: reads_all(lake)) == 0
    assert reads_all(lake)
    lake.close()


def test_a_fork_inside_the_background_threads_own_code(url, monkeypatch):
    """The loop's thread stands anywhere, also between two of its own steps, when another thread forks."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        goes_on.wait(WAIT_S)

    with Lake(url) as lake:
        lake._running()._submit(stand)
        stands.wait()
        assert in_child(lambda: reads_all(lake)) == 0
        goes_on.set()
        assert reads_all(lake)


def test_a_dropped_lake_of_the_parent_is_not_finalized_in_the_child(url):
    """Its sockets are the parent's."""
    with Lake(url) as lake:
        loop = lake._running()

        def child() -> bool:
            nonlocal lake
            fds = len(os.listdir("/proc/self/fd"))
            del lake
            gc.collect()
            return len(os.listdir("/proc/self/fd")) == fds and loop in background._of_parents

        assert in_child(child) == 0


def _spawned(lake: Lake, answers) -> None:
    answers.put((reads_all(lake), "pyfuse3" in sys.modules))


def test_a_spawned_process_gets_the_lake_as_an_argument(url):
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with Lake(url) as lake:
        process = context.Process(target=_spawned, args=(lake, answers))
        process.start()
        process.join(WAIT_S)
        assert process.exitcode == 0
        assert answers.get() == (True, False)


_PROGRAM = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in {"pyfuse3", "stepfs.mount", "torch"}, name
        if name.startswith("stepfs.mount"):
            raise AssertionError(name)
sys.meta_path.insert(0, Blocked())
from stepfs import Lake
lake = Lake(sys.argv[1])
for step in lake.follow(0):
    assert len(step[0]) and len(lake[step][1])
    if step == lake.frontier:
        break
assert "pyfuse3" not in sys.modules
def wait():
    try:
        next(lake.follow(99))
    except ValueError:
        pass
import threading
threading.Thread(target=wait, daemon=True).start()
print("read", step + 1)
"""


def test_without_pyfuse3_and_never_closed_it_reads_and_ends_with_the_interpreter(url):
    """Also while another thread waits in it."""
    began = time.monotonic()
    done = ran([sys.executable, "-X", "faulthandler", "-W", "error", "-c", _PROGRAM, url], timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, f"read {STEPS}\n"), done.stderr
    assert not done.stderr
    assert time.monotonic() - began < WAIT_S


def test_ctrl_c_ends_a_program_that_waits(url):
    program = "import sys\nfrom stepfs.reader import Lake\nlake = Lake(sys.argv[1])\nprint(1, flush=True)\nnext(lake.follow(99))"
    process = subprocess.Popen([sys.executable, "-c", program, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=WAIT_S)  # follow would wait for 300 s
    assert process.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in said


def test_a_log_that_was_read_once_is_not_read_again_after_a_fork_a_rest_or_a_pickle(url, monkeypatch):
    with Lake(url) as lake:
        assert reads_all(lake)
        monkeypatch.setattr(LogReader, "open", None)
        assert in_child(lambda: reads_all(lake)) == 0
        copy = pickle.loads(pickle.dumps(lake))
        lake.rest()
        assert in_child(lambda: reads_all(lake)) == 0
        assert reads_all(lake)
        with copy:
            assert reads_all(copy)


def test_a_long_tail_of_wide_steps_does_not_travel_to_each_worker(tmp_path):
    url, slices, steps = (tmp_path / "wide").as_uri(), 16_384, 12
    lake_on_disk(url, slices=slices)
    commit_on_disk(url, range(steps), 1, slices=slices)
    with Lake(url) as lake:
        assert len(lake._newest_known().tail) == steps
        travels = pickle.dumps(lake)
        assert len(travels) < 4096, "it was 400 KB a step"
        with pickle.loads(travels) as copy:
            assert copy.next_step == steps
            assert bytes(copy.read(steps - 1, slices - 1)) == bytes(lake.read(steps - 1, slices - 1))
