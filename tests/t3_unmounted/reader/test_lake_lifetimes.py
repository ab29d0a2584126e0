"""How a `Lake` ends, rests, travels to another process and fails; what waits in it learns of it."""

from __future__ import annotations

import gc
import pickle
import signal
import subprocess
import threading
import time
import weakref

import pytest
from beside import WAIT_S, background_threads, in_thread, is_waiting, until
from shelf import SMALL, commit_on_disk, lake_on_disk, payload

from stepfs import Lake, background
from stepfs.errors import ClosedError, RefusedError, StepfsError

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_closing_ends_who_waits_and_frees_thread_and_memory(still):
    lake = Lake(still)
    thread, found = in_thread(lambda: list(lake.follow(5)))
    until(lambda: is_waiting(lake))
    parts = weakref.ref(lake._parts())
    view = lake[0][0]
    lake.close()
    thread.join(WAIT_S)
    assert isinstance(found[0], ClosedError)
    assert not background_threads()
    found.clear()
    gc.collect()
    assert parts() is None
    assert view == payload(0, 0, SMALL), "what was given out stays"
    lake.close()
    for use in (lambda: lake[0], lambda: lake.next_step, lambda: lake.read(0, 0), lambda: next(lake.follow())):
        with pytest.raises(ClosedError, match="closed"):
            use()
    assert issubclass(ClosedError, ValueError)
    assert lake.lake_id


def test_a_lake_nobody_holds_ends_by_itself(still):
    lake = Lake(still)
    assert lake[0][0]
    assert len(background_threads()) == 1
    del lake
    gc.collect()
    until(lambda: not background_threads())


def test_a_lake_that_rests_goes_on_when_it_is_used(url):
    with Lake(url) as lake:
        lake.rest()
        assert not background_threads()
        commit_on_disk(url, range(5, 6))
        assert lake[5][0] == payload(5, 0, SMALL)


def test_ctrl_c_ends_a_wait_of_the_main_thread_at_once(still):
    class InterruptedByTestError(Exception):
        pass

    def interrupt(number, frame):
        raise InterruptedByTestError

    with Lake(still) as lake:
        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            main = threading.main_thread().ident
            assert main is not None

            def strike() -> None:
                until(lambda: is_waiting(lake))
                signal.pthread_kill(main, signal.SIGUSR1)

            thread, found = in_thread(strike)
            began = time.monotonic()
            with pytest.raises(InterruptedByTestError):
                next(lake.follow(5))
            assert time.monotonic() - began < WAIT_S
            thread.join()
            assert found == [None]
            until(lambda: not is_waiting(lake))  # nothing goes on waiting in its place
            assert lake[4][0] == payload(4, 0, SMALL)
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_it_travels_as_its_options_and_opens_where_it_is_used(still):
    with Lake(still, world=4, wait="5s") as lake:
        copy = pickle.loads(pickle.dumps(lake))
    assert (copy.world, copy.lake_id, copy.options) == (4, lake.lake_id, lake.options)
    assert not background_threads()
    with pickle.loads(pickle.dumps(Lake(still))) as again:
        assert again[0][0] == payload(0, 0, SMALL)


def test_a_copy_refuses_another_lake_under_the_url(url, tmp_path):
    with Lake(url) as lake:
        copy = pickle.loads(pickle.dumps(lake))
    (tmp_path / "lake").rename(tmp_path / "before")
    lake_on_disk(url)
    with pytest.raises(RefusedError, match="was replaced"):
        assert copy.next_step


def test_a_loop_that_failed_says_why_for_good(still):
    async def broken() -> None:
        raise ZeroDivisionError

    with Lake(still) as lake:
        waiting, found = in_thread(lambda: next(lake.follow(5)))
        until(lambda: is_waiting(lake))
        loop = lake._running()
        loop._submit(lambda: loop._nursery.start_soon(broken))  # as a bug in one of its tasks
        waiting.join(WAIT_S)
        assert "failed for good" in str(found[0])
        until(lambda: not background_threads())
        for _ in range(2):
            with pytest.raises(StepfsError, match="failed for good"):
                assert lake[0][0]
            with pytest.raises(StepfsError, match="failed for good"):
                assert lake.next_step
    assert not background._alive


def test_a_worker_waits_no_longer_than_its_trainer_lives(still):
    with subprocess.Popen(["sleep", "600"]) as trainer, Lake(still) as lake:
        lake.rest()
        lake.as_worker(2, owner=trainer.pid)
        waiting, found = in_thread(lambda: next(lake.follow(5)))
        until(lambda: is_waiting(lake))
        trainer.kill()
        waiting.join(WAIT_S)
        assert isinstance(found[0], ClosedError)
        assert "has ended" in str(found[0])


def test_a_worker_reads_where_a_sandbox_has_no_pidfd(still, monkeypatch):
    def forbidden(_pid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.pidfd_open", forbidden)
    with Lake(still) as lake:
        lake.rest()
        lake.as_worker(2, owner=1)
        assert lake[0][0] == payload(0, 0, SMALL)
        assert lake[1][0] == payload(1, 0, SMALL)
