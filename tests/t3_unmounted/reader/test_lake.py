"""`Lake`: what it gives, what it refuses, and how it ends."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
import shutil
import signal
import subprocess
import threading
import time
import weakref
from typing import get_type_hints

import pytest
import trio
from beside import WAIT_S, background_threads, in_thread, is_waiting, until
from shelf import SMALL, Shelf, commit_on_disk, lake_of, lake_on_disk, payload, seal_on_disk

from stepfs import CheckpointHook, Lake, StepDataset, StreamState
from stepfs._internal import background
from stepfs._internal.clock import SystemClock
from stepfs.errors import (
    AbsentError,
    ClosedError,
    NoSuchStepError,
    RefusedError,
    StepfsError,
    UsageError,
    WrongTypeError,
)
from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.replicate import Copier, Replica
from stepfs.mount.status import describe_step
from stepfs.reader.options import LakeOptions
from stepfs.store.local.local_store import LocalStore
from stepfs.store.opening import open_store
from stepfs_producer import Producer

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_steps_and_ranks(still):
    with Lake(still) as lake:
        assert (len(lake), lake.next_step, lake.first_step, lake.world) == (5, 5, 0, 2)
        assert lake.steps == range(5)
        assert not lake.sealed
        view = lake[3][1]
        assert isinstance(view, memoryview)
        assert view == payload(3, 1, SMALL)
        assert [int(step) for step in lake] == [0, 1, 2, 3, 4]
        step = lake[2]
        assert step == 2
        assert f"{step:09d}" == "000000002"
        assert step[0] == lake[2][0] == payload(2, 0, SMALL)
        assert pickle.loads(pickle.dumps(step)).__class__ is int


def test_bytes_come_from_a_copy_of_the_objects_although_the_lake_lost_them(tmp_path, monkeypatch):
    url = lake_of(tmp_path, 3)
    home = tmp_path / "lake"
    (data,) = home.glob("*/data")
    shutil.copytree(data, tmp_path / "place" / data.relative_to(home))
    shutil.rmtree(data)
    monkeypatch.setenv("STEPFS_NEAR", f"file://{tmp_path}/place")  # as with an option of `stepfs mount`
    with Lake(url) as lake:
        assert [lake[step][1] for step in range(3)] == [payload(step, 1, SMALL) for step in range(3)]
    with Lake(url, near=f"file://{tmp_path}/place") as lake:
        assert lake[2][0] == payload(2, 0, SMALL)


@pytest.mark.logs("has no data of this lake")  # it has none under the fork's own id
def test_a_fork_whose_parent_is_gone_is_read_from_a_copy_of_the_parents_objects(tmp_path):
    """Names of objects are the parent's, whoever inherits them."""
    url, child, home = lake_of(tmp_path, 3), (tmp_path / "child").as_uri(), tmp_path / "lake"

    async def work() -> None:
        store = open_store(url)
        log = await LogReader.open(store, await open_lake(store))
        await fork(log, open_store(child), Cut(Step(3), Step(3), Step(3)), SystemClock())

    trio.run(work)
    commit_on_disk(child, range(3, 4))
    home.rename(tmp_path / "place")
    with Lake(child, near=f"file://{tmp_path}/place") as lake:
        assert [lake[step][1] for step in range(4)] == [payload(step, 1, SMALL) for step in range(4)]


@pytest.mark.logs("has no data of this lake|STEPFS_NEAR is")
def test_a_near_place_without_the_lake_changes_nothing_and_the_lake_itself_is_none(tmp_path, monkeypatch, caplog):
    url = lake_of(tmp_path, 2)
    with Lake(url, near=f"file://{tmp_path}/nothing") as lake:
        assert lake[1][0] == payload(1, 0, SMALL)
    with pytest.raises(UsageError, match="the lake itself; name a place that is nearer, or leave it out"):
        Lake(url, near=url + "/")
    monkeypatch.setenv("STEPFS_NEAR", url)  # a node's default for all lakes, of which this one is the place
    with Lake(url) as lake:
        assert lake[1][0] == payload(1, 0, SMALL)
    assert f"STEPFS_NEAR is {url}, the lake itself: it is not used here" in caplog.text
    with pytest.raises(UsageError, match="unknown scheme"):
        Lake(url, near="ftp://host/x")


def test_a_note_stays_with_its_step_in_the_index_a_fork_and_a_copy(tmp_path):
    url, child, copy = ((tmp_path / name).as_uri() for name in ("lake", "child", "copy"))
    lake_on_disk(url)
    with Producer(url, producer_id="collector") as producer:
        for step in range(SEGMENT_STEPS + 2):
            note = {"policy": step, "of": "x" * 100} if step % 2 else None
            producer.append([b"a", b"b"], position=step, note=note)
        producer.flush()
        with pytest.raises(UsageError, match="note takes 303 bytes as msgpack, at most 256 fit"):
            producer.append([b"a", b"b"], position=0, note="x" * 300)
        with pytest.raises(UsageError, match="note does not fit msgpack"):
            producer.append([b"a", b"b"], position=0, note=object())

    async def work() -> None:
        log = await LogReader.open(open_store(url), await open_lake(open_store(url)))
        cut = Step(SEGMENT_STEPS + 1)
        await fork(log, open_store(child), Cut(cut, cut, cut), SystemClock())
        replica = await Replica.open(Copier(open_store(url), open_store(copy)), clock=SystemClock())
        while await replica.round():
            pass
        entry = await log.entry(Step(1))
        described = json.loads(await describe_step(log.store, log.identity.lake_id, log.state, entry))
        assert described["note"] == {"policy": 1, "of": "x" * 100}

    trio.run(work)
    for place in (url, child, copy):
        with Lake(place) as lake:
            for step in (1, SEGMENT_STEPS - 1):
                assert lake[step].note == {"policy": step, "of": "x" * 100}
            assert lake[0].note is lake[SEGMENT_STEPS].note is None
    with Lake(copy) as lake:
        assert lake[SEGMENT_STEPS + 1].note == {"policy": SEGMENT_STEPS + 1, "of": "x" * 100}


def test_what_is_not_there_says_so(still):
    with Lake(still) as lake:
        for wrong in (5, -1, 2**60):
            with pytest.raises(IndexError):
                lake[wrong]
        for rank in (2, -1):
            with pytest.raises(NoSuchStepError, match="ranks 0 to 1"):
                lake[0][rank]
        with pytest.raises(WrongTypeError):
            lake["0"]
        with pytest.raises(WrongTypeError):
            lake[True]


def test_ranks_of_a_world_share_slices(still):
    with Lake(still, world=4) as lake:
        assert lake[1][0] == lake[1][1] == payload(1, 0, SMALL)
        assert lake[1][3] == payload(1, 1, SMALL)
    with pytest.raises(UsageError, match="world=3"):
        Lake(still, world=3)
    with pytest.raises(UsageError, match="rank 7"):
        Lake(still, ranks="0-7")


def test_options_that_a_mount_would_refuse_are_refused(still):
    for options in (
        {"wait": "soon"},
        {"poll": 0},
        {"memory": "1M"},
        {"steps": "5"},
        {"steps": range(0, 9, 2)},
        {"deadline": 0},
        {"prefetch": -1},
        {"ranks": -1},
        {"ranks": "a"},
        {"mesh": "dp"},
        {"mesh": "dp=4,cp=2"},
        {"group": ""},
    ):
        with pytest.raises(UsageError):
            Lake(still, **options)
    assert not background_threads()


def test_each_word_of_a_lake_is_declared_by_one_field_of_its_options():
    declared = [
        word.name
        for hint in get_type_hints(LakeOptions, include_extras=True).values()
        for word in getattr(hint, "__metadata__", ())
    ]
    assert sorted(declared) == sorted(inspect.signature(Lake).parameters)


def test_a_lake_that_is_not_there_says_so(tmp_path):
    with pytest.raises(AbsentError, match="is not a lake"):
        Lake((tmp_path / "none").as_uri())
    with pytest.raises(UsageError, match="has no scheme"):
        Lake(str(tmp_path))


def test_following_gives_each_step_once_as_it_is_committed_and_ends_with_the_lake(url):
    with Lake(url) as lake:
        seen: list[int] = []

        def follow() -> None:
            for step in lake.follow(1):
                assert step[0] == payload(step, 0, SMALL)
                seen.append(int(step))

        thread, found = in_thread(follow)
        until(lambda: len(seen) == 4)
        until(lambda: is_waiting(lake))
        commit_on_disk(url, range(5, 8))
        until(lambda: len(seen) == 7)
        seal_on_disk(url)
        thread.join(WAIT_S)
        assert found == [None]
        assert seen == [1, 2, 3, 4, 5, 6, 7]
        assert list(lake.follow()) == list(range(8))
        assert lake.sealed


def test_eight_threads_share_one_fetch_of_a_slice(url):
    commit_on_disk(url, range(5, 6), 3 << 20)
    with Lake(url, prefetch=0) as lake:
        together = threading.Barrier(8)

        def read() -> bool:
            together.wait()
            return lake[5][1] == payload(5, 1, 3 << 20)

        threads = [in_thread(read) for _ in range(8)]
        for thread, found in threads:
            thread.join(WAIT_S)
            assert found == [True]
        assert lake.counts()["requests"] == 1
        assert lake.counts()["bytes_fetched"] == 3 << 20


def test_two_lakes_at_once_have_nothing_in_common(still, tmp_path):
    other = (tmp_path / "other").as_uri()
    lake_on_disk(other)
    commit_on_disk(other, range(2), 77)
    with Lake(still) as first, Lake(other) as second, Lake(still) as third:
        assert first[0][0] == third[0][0] == payload(0, 0, SMALL)
        assert second[0][0] == payload(0, 0, 77)
        second.close()
        assert first[1][0] == payload(1, 0, SMALL)
        assert len(background_threads()) == 2


def test_state_and_checkpoints_of_a_training_loop(url):
    """The same as with files: one integer, one hook."""
    with Lake(url, group="train") as lake:
        stream = StreamState.of_lake(lake)
        durable = CheckpointHook(lake, keep=2)
        for step in lake.follow(stream.next_step):
            stream.next_step = step + 1
            if stream.next_step == 4:
                durable(stream.next_step)
                break
        until(lambda: lake.first_step == 4)
        saved = stream.state_dict()
    stream.load_state_dict(saved)  # of a lake that is closed
    with Lake(url, group="train") as lake:
        resumed = StreamState.of_lake(lake)
        resumed.load_state_dict(saved)
        assert next(lake.follow(resumed.next_step)) == 4 == lake.first_step


def test_a_pace_costs_three_requests_and_no_checkpoint(url, monkeypatch):
    asked: list[str] = []

    def counted(name: str) -> None:
        plain = getattr(LocalStore, name)

        def call(self: LocalStore, key: str, *arguments: object, **options: object) -> object:
            if threading.current_thread().name == "stepfs-checkpoints":
                asked.append(f"{name} {key.partition('/')[2]}")
            return plain(self, key, *arguments, **options)

        monkeypatch.setattr(LocalStore, name, call)

    for name in ("get", "create", "list"):
        counted(name)
    with Lake(url, group="train") as lake:
        until(lambda: lake.next_step >= 4)
        pace = CheckpointHook(lake, pace=True)
        pace(1)
        asked.clear()
        pace(2)
        assert len(asked) <= 3, asked
        for wrong in (
            lambda: pace.resumed(1),
            lambda: pace.dropped(1),
            lambda: CheckpointHook(lake, pace=True, keep=2),
        ):
            with pytest.raises(UsageError, match="pace"):
                wrong()
        assert lake.first_step == 0


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
    assert loop not in background._alive


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


@pytest.mark.logs("waiting for step 1; 1 are committed")
async def test_why_a_reader_without_a_mount_waited(autojump_clock):
    """The same causes, by the same sums: slow producers, then a slow store."""
    shelf = await Shelf.of(1000)
    async with shelf.reader(wait_s=100) as assembly:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shelf.read, assembly, 1, 0)
            await trio.sleep(20)
            await shelf.commit(1000)
        sums = await assembly.sums()
        spent = trio.current_time() - began
        assert sums["seconds"]["commit"] == pytest.approx(spent, rel=0.05)
        assert sums["blocked_s"] == pytest.approx(spent, rel=0.05)


def test_the_waits_of_a_lake_are_those_of_this_process(url):
    with Lake(url, wait=60) as lake:
        assert set(lake.waits()) == {"seconds", "count", "blocked_s"}
        later = threading.Timer(0.2, commit_on_disk, (url, range(5, 6)))
        later.start()
        bytes(lake[5][0])
        later.join()
        assert lake.waits()["seconds"]["commit"] > 0
        dataset = StepDataset(lake, rank=0, stop=3)
        assert dataset.waits() == lake.waits()
