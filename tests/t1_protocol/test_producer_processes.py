"""The producer of programs without an event loop, in real processes: threads, forks, Ctrl-C, kill -9."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from functools import partial

import pytest
import trio
from committed import committed
from finished import ran

from stepfs.errors import AbsentError, FencedError, UsageError
from stepfs.lake.identity import create_lake
from stepfs.store.opening import open_store
from stepfs_producer import Producer


def steps_of(url: str) -> list[tuple[str, bytes]]:
    """(producer id, first slice) of every step."""
    return [(name, slices[0]) for name, slices in committed(url)]


PRELUDE = """
import os, signal, sys, threading, trio
from stepfs.errors import ClosedError, RefusedError
from stepfs_producer import Producer
from stepfs_producer.commit.loop import CommitLoop
from stepfs_producer.commit.producer import AsyncProducer
lake = sys.argv[1]
"""


def script_of(work: str) -> str:
    return PRELUDE + textwrap.dedent(work)


def in_child(lake: str, work: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own; forking a pytest process full of threads is nobody's use case."""
    return ran([sys.executable, "-W", "ignore::DeprecationWarning", "-c", script_of(work), lake])


def test_hazard_08_a_forked_producer_is_refused(lake: str) -> None:
    done = in_child(
        lake,
        """
        with Producer(lake, producer_id="p") as producer:
            producer.append([b"0", b""], position=1)
            child = os.fork()
            if child == 0:
                refused = 0
                for use in (
                    lambda: producer.append([b"1", b""], position=2),
                    producer.flush,
                    lambda: producer.position,
                    producer.retire,
                    lambda: producer.__exit__(None, None, None),
                ):
                    try:
                        use()
                    except RefusedError as error:
                        assert "fork" in str(error)
                        refused += 1
                os._exit(refused)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
            producer.append([b"1", b""], position=2)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(lake) == [("p", b"0"), ("p", b"1")]


def test_ctrl_c_in_a_blocked_append_ends_cleanly_and_abandons(lake: str) -> None:
    """Nothing is committed, so the budget fills and append blocks; then SIGINT arrives."""
    done = in_child(
        lake,
        """
        async def never(self):
            await trio.sleep_forever()

        async def blocked(self):
            os.kill(os.getpid(), signal.SIGINT)
            await trio.sleep_forever()

        CommitLoop.run, AsyncProducer._wait_for_change = never, blocked
        try:
            with Producer(lake, producer_id="p", max_pending_bytes=1000) as producer:
                for number in range(100):
                    producer.append([b"x" * 400, b""], position=number)
        except KeyboardInterrupt:
            print("interrupted", [t.name for t in threading.enumerate() if "stepfs" in t.name])
        """,
    )
    assert done.stdout.strip() == "interrupted []", done.stderr
    assert done.stderr == ""


def test_ctrl_c_just_before_a_wait_ends_it(lake: str) -> None:
    """CPython looks for signals between two bytecodes: one that comes after the last look does not wake a lock."""
    done = in_child(
        lake,
        """
        import ctypes, functools, operator, types
        from stepfs._internal import background

        late = [functools.partial(ctypes.CDLL(None)["raise"], signal.SIGINT)]

        class Lock:
            def __init__(self):
                self._lock = threading.Lock()
                self.release = self._lock.release

            def acquire(self, timeout=-1):
                calls = [functools.partial(self._lock.acquire, True, timeout)]
                if late and self._lock.locked():
                    calls.insert(0, late.pop())
                return any(map(operator.call, calls))  # no bytecode lies between the two

        with Producer(lake, producer_id="p") as producer:
            background.threading = types.SimpleNamespace(**vars(threading) | {"Lock": Lock})
            try:
                producer._call(trio.sleep_forever)
            except KeyboardInterrupt:
                print("interrupted", late)
        """,
    )
    assert done.stdout == "interrupted []\n", done.stderr


def test_ctrl_c_takes_the_append_back_that_waits(lake: str) -> None:
    """Whoever catches it continues at `next_seq`: no batch is missing, none comes twice."""
    done = in_child(
        lake,
        """
        commits, run = threading.Event(), CommitLoop.run
        full, wait = threading.Event(), AsyncProducer._wait_for_change

        async def later(self):
            while not commits.is_set():
                await trio.sleep(0.01)
            await run(self)

        async def noted(self):
            full.set()
            await wait(self)

        def interrupt():
            full.wait()
            os.kill(os.getpid(), signal.SIGINT)

        CommitLoop.run, AsyncProducer._wait_for_change = later, noted
        with Producer(lake, producer_id="p", max_pending_bytes=1000) as producer:
            number = interrupted = 0
            threading.Thread(target=interrupt).start()
            while number < 40:
                try:
                    assert producer.append([b"%d" % number + b"x" * 400, b""], position=number) == number
                    number += 1
                except KeyboardInterrupt:
                    number = producer.next_seq
                    interrupted += 1
                    commits.set()
        print(number, interrupted)
        """,
    )
    assert done.stderr == ""
    assert done.stdout == "40 1\n"
    assert steps_of(lake) == [("p", b"%d" % number + b"x" * 400) for number in range(40)]


def test_a_process_ends_while_another_thread_waits_in_its_producer(lake: str) -> None:
    done = in_child(
        lake,
        """
        waiting = threading.Event()

        async def never(self):
            waiting.set()
            await trio.sleep_forever()

        CommitLoop.run = never
        producer = Producer(lake, producer_id="p").__enter__()

        def flush():
            try:
                producer.append([b"0", b""], position=1)
                producer.flush()
            except ClosedError:
                pass

        threading.Thread(target=flush, daemon=True).start()
        waiting.wait()
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_of(lake) == []


def test_a_producer_made_before_a_fork_does_not_start_in_the_child(lake: str) -> None:
    done = in_child(
        lake,
        """
        producer = Producer(lake, producer_id="p")
        if os.fork() == 0:
            try:
                producer.__enter__()
            except RefusedError:
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
        with producer:
            producer.append([b"0", b""], position=1)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(lake) == [("p", b"0")]


def test_a_process_that_forgets_to_leave_does_not_hang(lake: str) -> None:
    done = in_child(
        lake,
        """
        producer = Producer(lake, producer_id="p").__enter__()
        producer.append([b"0", b""], position=1)
        producer.flush()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(lake) == [("p", b"0")]


@pytest.mark.parametrize("after", [5, *(pytest.param(more, marks=pytest.mark.nightly) for more in (0, 1, 2, 9, 14))])
def test_killed_minus_nine_and_restarted_is_exactly_once(lake: str, after: int) -> None:
    work = """
        with Producer(lake, producer_id="p") as producer:
            print("live", flush=True)
            for number in range(producer.position or 0, 20):
                print(producer.append([b"%d" % number, b""], position=number + 1), flush=True)
                if number % 3 == 0:
                    producer.flush()
        """
    victim = subprocess.Popen([sys.executable, "-c", script_of(work), lake], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    for _ in range(after):
        victim.stdout.readline()
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    with Producer(lake, producer_id="p") as producer:
        for number in range(producer.position if isinstance(producer.position, int) else 0, 20):
            producer.append([b"%d" % number, b""], position=number + 1)
    assert steps_of(lake) == [("p", b"%d" % number) for number in range(20)]


SLICES = 2


def batch(number: int) -> list[bytes]:
    return [b"%d" % number, b"other"]


def test_append_flush_and_resume(lake: str) -> None:
    with Producer(lake, producer_id="p") as producer:
        assert producer.position is None
        assert (producer.epoch, producer.lake.slices) == (1, SLICES)
        for number in range(5):
            assert producer.append(batch(number), position={"next": number + 1}) == number
        producer.flush()
        assert producer.committed_seq == producer.next_seq == 5
    with Producer(lake, producer_id="p") as producer:
        assert producer.position == {"next": 5}
        producer.append(batch(5), position={"next": 6})
    assert steps_of(lake) == [("p", b"%d" % number) for number in range(6)]


def test_an_exception_in_the_block_passes_through_unwrapped(lake: str) -> None:
    with pytest.raises(KeyError, match="mine"), Producer(lake, producer_id="p") as producer:
        producer.append(batch(0), position=1)
        raise KeyError("mine")
    with Producer(lake, producer_id="p") as producer:
        assert producer.position in {None, 1}


def test_errors_of_starting_surface_in_the_caller(file_url: str, lake: str) -> None:
    with pytest.raises(AbsentError, match="stepfs init"), Producer(f"{file_url}-no", producer_id="p"):
        pass
    with pytest.raises(UsageError, match="scheme"), Producer("ftp://x", producer_id="p"):
        pass
    producer = Producer(lake, producer_id="p")
    with pytest.raises(UsageError, match="not been started"):
        producer.append(batch(0), position=0)
    with producer:
        pass
    with pytest.raises(UsageError, match="closed"):
        producer.append(batch(0), position=0)
    with pytest.raises(UsageError, match="runs once"), producer:
        pass


def test_fenced_surfaces_in_append_or_flush(lake: str) -> None:
    with pytest.raises(FencedError), Producer(lake, producer_id="p") as old:
        with Producer(lake, producer_id="p") as new:
            new.append(batch(0), position=1)
        old.append(batch(0), position=1)
        old.flush()
    assert steps_of(lake) == [("p", b"0")]


def test_no_thread_outlives_the_block(lake: str) -> None:
    before = threading.active_count()
    with Producer(lake, producer_id="p") as producer:
        producer.append(batch(0), position=1)
    assert not [t for t in threading.enumerate() if t.name.startswith("stepfs-producer")]
    assert threading.active_count() <= before + 20  # trio keeps idle workers of its own for a moment


def test_several_threads_may_append(lake: str) -> None:
    with Producer(lake, producer_id="p", max_pending_bytes=1000) as producer:
        threads = [
            threading.Thread(target=lambda: [producer.append(batch(7), position=None) for _ in range(20)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(steps_of(lake)) == 80


def test_producers_side_by_side_on_a_real_store(lake_url: str) -> None:
    """Four at once, each restarted once, on a directory and on a real S3 server."""
    trio.run(partial(create_lake, open_store(lake_url), slices=SLICES))

    def life(who: str, until: int) -> None:
        with Producer(lake_url, producer_id=who) as producer:
            start = producer.position
            for number in range(start if isinstance(start, int) else 0, until):
                producer.append(batch(number), position=number + 1)

    for until in (8, 15):
        threads = [threading.Thread(target=life, args=(f"p{name}", until)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    steps = steps_of(lake_url)
    for name in range(4):
        assert [data for who, data in steps if who == f"p{name}"] == [b"%d" % number for number in range(15)]
