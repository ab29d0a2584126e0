"""The reader without a mount: bytes, waits, processes, and forked lakes."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
import trio
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from finished import ran
from hypothesis import given, settings
from hypothesis import strategies as st
from lakework import list_groups
from shelf import SMALL, Shelf, commit_on_disk, lake_of, lake_on_disk, outcome_of, payload
from trio.testing import MockClock

from stepfs import Lake
from stepfs._internal import background
from stepfs._internal.clock import SystemClock
from stepfs.data.announced_orders import ShuffleHint, StridedOrder
from stepfs.errors import (
    AbsentError,
    CorruptError,
    NoSuchStepError,
    ReclaimedError,
    RefusedError,
    StepfsError,
    StoreUnreachableError,
    WaitExpiredError,
)
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.keys import log_prefix, numbered
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.reader.assembly import CopyPool
from stepfs.store.opening import open_store

pytestmark = pytest.mark.logs("waiting for step")
MIB = 1 << 20


@settings(max_examples=15)
@given(
    sizes=st.lists(st.sampled_from([0, 1, SMALL, 65536, MIB - 1, MIB, 3 * MIB + 5]), min_size=1, max_size=5),
    readers=st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), max_size=6), max_size=4),
    memory=st.sampled_from([13, 16, 64]),
    held=st.booleans(),
)
def test_any_interleaving_of_reads_gives_the_committed_bytes(sizes, readers, memory, held):
    async def main() -> None:
        shelf = await Shelf.of(*sizes)
        views = []
        async with shelf.reader(memory_bytes=memory * MIB) as reader:

            async def read(places) -> None:
                for step, index in places:
                    if step < len(sizes):
                        view = await reader.read(Step(step), SliceIndex(index))
                        assert view.readonly
                        assert view.contiguous
                        assert bytes(view) == shelf.expected(step, index)
                        if held:
                            views.append((step, index, view))

            async with trio.open_nursery() as nursery:
                for places in readers:
                    nursery.start_soon(read, places)
            # What callers still hold has not changed, whatever was read since.
            assert all(bytes(view) == shelf.expected(step, index) for step, index, view in views)
            assert reader.slices.cache.pool.used <= reader.slices.cache.pool.limit
        assert all(bytes(view) == shelf.expected(step, index) for step, index, view in views)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_slice_larger_than_the_memory_is_read_whole(autojump_clock):
    shelf = await Shelf.of(25 * MIB)
    async with shelf.reader(memory_bytes=24 * MIB) as reader:
        view = await reader.read(Step(0), SliceIndex(1))
        assert view == shelf.expected(0, 1)


async def test_many_readers_of_a_slice_share_one_fetch_and_each_copies_once(autojump_clock):
    shelf = await Shelf.of(2 * MIB)
    async with shelf.reader() as reader:
        views = []

        async def read() -> None:
            views.append(await reader.read(Step(0), SliceIndex(1)))

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(read)
        assert [bytes(view) for view in views] == [shelf.expected(0, 1)] * 8
        assert reader.slices.counts.bytes_fetched == 2 * MIB + 1
        assert reader.slices.counts.requests == 1
        assert reader.slices.counts.bytes_delivered == 8 * (2 * MIB + 1), "each copies once"


async def test_memory_is_used_again_only_when_nobody_sees_it():
    class Whole:
        length = 2 * MIB

        def __init__(self, fill: int) -> None:
            self.fill = fill

        async def read(self, offset, size):
            return memoryview(bytes([self.fill]) * min(size, self.length - offset))

    lending = CopyPool(4 * MIB)
    first, second = await lending.copy_of(Whole(1)), await lending.copy_of(Whole(2))
    beyond = await lending.copy_of(Whole(3))  # the budget is held: memory of its own
    assert (first[0], second[-1], beyond[7]) == (1, 2, 3)
    assert lending._pool.used == 4 * MIB
    part = first[5:10]
    address = id(first.obj)
    del first
    fourth = await lending.copy_of(Whole(4))
    assert part == bytes([1]) * 5, "a slice of a view keeps the memory as well"
    assert id(fourth.obj) != address
    del part
    fifth = await lending.copy_of(Whole(5))
    assert id(fifth.obj) == address, "used again"
    with pytest.raises(TypeError):
        fifth[0] = 1


async def test_a_read_that_fails_gives_its_memory_back():
    class Broken:
        length = 2 * MIB

        async def read(self, offset, size):
            raise CorruptError("x.tgb: rotten")

    lending = CopyPool(4 * MIB)
    for _ in range(5):
        with pytest.raises(CorruptError):
            await lending.copy_of(Broken())
    gc.collect()
    lending._pool.sweep()
    assert lending._pool.used == 0


async def test_a_damaged_slice_is_an_error_for_it_alone(autojump_clock):
    shelf = await Shelf.of(SMALL, SMALL)
    key = shelf.data_key(0)
    body = bytearray(shelf.shared.objects[key])
    at = bytes(body).index(payload(0, 1, SMALL + 1))
    body[at + 3] ^= 1
    shelf.shared.objects[key] = bytes(body)
    async with shelf.reader() as reader:
        for _ in range(2):
            error = await outcome_of(shelf.read, reader, 0, 1)
            assert isinstance(error, CorruptError)
            assert key in str(error)
            assert await shelf.read(reader, 0, 0) == shelf.expected(0, 0)
        assert await shelf.read(reader, 1, 1) == shelf.expected(1, 1)
        shelf.shared.objects[key] = body[:at] + payload(0, 1, SMALL + 1) + body[at + SMALL + 1 :]
        assert await shelf.read(reader, 0, 1) == shelf.expected(0, 1), "it was restored"


async def test_a_lost_object_is_damage_and_a_reclaimed_one_is_not(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 4)
    async with shelf.reader(poll_s=60.0) as reader:
        await shelf.checkpoint("train", 2)
        await shelf.reclaim()  # the reader has not seen it yet
        assert reader.tree.readable(Step(1))
        assert isinstance(await outcome_of(shelf.read, reader, 1, 0), ReclaimedError)
        lost = shelf.data_key(1)  # of the steps that are left, the second
        del shelf.shared.objects[lost]
        error = await outcome_of(shelf.read, reader, 3, 0)
        assert isinstance(error, CorruptError)
        assert lost in str(error)
        assert await shelf.read(reader, 2, 0) == shelf.expected(2, 0)


async def test_steps_in_order_are_fetched_ahead(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 12)
    async with shelf.reader(ranks=(0,)) as reader:
        for step in range(6):
            assert await shelf.read(reader, step, 0) == shelf.expected(step, 0)
            await trio.sleep(1)
        assert reader.slices.counts.hits >= 4
        assert not reader.slices.holds(Step(8), SliceIndex(1))


async def test_nothing_is_fetched_before_a_step_was_read_or_announced(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 12)
    async with shelf.reader(ranks=(0,)) as reader:
        await trio.sleep(5)
        assert reader.slices.counts.requests == 0


async def test_one_of_several_workers_fetches_what_it_was_told_and_nothing_else(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 24)
    async with shelf.reader(ranks=(0,), workers=3) as reader:
        await reader.announce(ShuffleHint(StridedOrder(Step(1), Step(24), 1, 3), 0))
        await trio.sleep(2)
        assert reader.slices.counts.requests > 0
        for step in range(1, 24, 3):
            assert await shelf.read(reader, step, 0) == shelf.expected(step, 0)
            await trio.sleep(1)
        counts = reader.slices.counts
        assert counts.bytes_fetched == counts.bytes_delivered == 8 * SMALL
        assert counts.misses == 0


async def test_one_of_several_workers_guesses_nothing(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 24)
    async with shelf.reader(ranks=(0,), workers=3) as reader:
        for step in range(10):
            await shelf.read(reader, step, 0)
            await trio.sleep(1)
        assert reader.slices.counts.bytes_fetched == 10 * SMALL


async def test_a_slow_store_is_asked_again(autojump_clock):
    """Hedging and retries are those of a mount."""

    class Slow(FaultyStore):
        calls = 0

        async def read_into(self, key, *args, **options):
            Slow.calls += 1
            if Slow.calls == 30:
                await trio.sleep(100)
            return await super().read_into(key, *args, **options)

    shelf = await Shelf.of(*[SMALL] * 40)
    async with shelf.reader(store=Slow(shelf.shared, actor="reader")) as reader:
        began = trio.current_time()
        for step in range(40):
            assert await shelf.read(reader, step, 0) == shelf.expected(step, 0)
        assert trio.current_time() - began < 20
        assert reader.slices.counts.hedges > 0


async def test_what_is_not_committed_is_not_there_at_once(autojump_clock):
    shelf = await Shelf.of(SMALL)
    async with shelf.reader() as reader:
        began = trio.current_time()
        error = await outcome_of(shelf.read, reader, 1, 0)
        assert isinstance(error, NoSuchStepError)
        assert isinstance(error, IndexError)
        assert isinstance(error, AbsentError)
        assert "1 steps are" in str(error)
        assert trio.current_time() - began < 0.1


async def test_with_wait_a_step_is_waited_for_and_absent_when_that_expires(autojump_clock):
    shelf = await Shelf.create()
    async with shelf.reader(wait_s=7.0) as reader, trio.open_nursery() as nursery:
        began = trio.current_time()
        error = await outcome_of(shelf.read, reader, 0, 0)
        assert isinstance(error, NoSuchStepError)
        assert "within 7 s" in str(error)
        assert trio.current_time() - began == pytest.approx(7.0, abs=0.5)

        async def commit_later() -> None:
            await trio.sleep(3.0)
            await shelf.commit(SMALL)

        await trio.sleep(2)  # a deadline outlives its last waiter by a second
        nursery.start_soon(commit_later)
        assert await shelf.read(reader, 0, 1) == shelf.expected(0, 1)


async def test_steps_to_come_are_waited_for_under_steps_until_the_deadline(autojump_clock):
    shelf = await Shelf.of(SMALL)
    async with shelf.reader(steps=range(1, 3), deadline_s=20.0) as reader:
        assert list(reader.tree.listed()) == [1, 2]
        error = await outcome_of(shelf.read, reader, 0, 0)
        assert isinstance(error, NoSuchStepError)
        assert "outside" in str(error)
        began = trio.current_time()
        error = await outcome_of(shelf.read, reader, 1, 0)
        assert isinstance(error, WaitExpiredError)
        assert isinstance(error, TimeoutError)
        assert isinstance(error, StepfsError)
        assert trio.current_time() - began == pytest.approx(20.0, abs=0.5)


async def test_following_waits_whatever_the_options_say(autojump_clock):
    shelf = await Shelf.create()
    async with shelf.reader(poll_s=1.0) as reader, trio.open_nursery() as nursery:
        nursery.start_soon(shelf.commit, SMALL)
        assert await reader.wait_for(Step(0), waits=True)
        error = await outcome_of(reader.wait_for, Step(0), waits=False)
        assert error is True
        began = trio.current_time()
        assert isinstance(await outcome_of(reader.wait_for, Step(1), waits=True), WaitExpiredError)
        assert trio.current_time() - began == pytest.approx(300.0, abs=1)


@pytest.mark.logs("cannot follow the lake")
async def test_a_lake_that_cannot_be_followed_is_the_reason_that_is_named(autojump_clock):
    shelf = await Shelf.of(SMALL)
    async with shelf.reader(deadline_s=20.0) as reader:
        damaged = numbered(log_prefix(shelf.identity.lake_id), (await shelf.log()).state.version + 1)
        await FaultyStore(shelf.shared).put(damaged, [b"garbage"])
        error = await outcome_of(reader.wait_for, Step(1), waits=True)
        assert isinstance(error, WaitExpiredError)
        assert "not seen within 20 s: the lake cannot be followed" in str(error)
        assert damaged in str(error)


async def test_without_a_deadline_following_waits_for_ever(autojump_clock):
    shelf = await Shelf.create()
    async with shelf.reader(deadline_s=math.inf, poll_s=2.0) as reader:
        with trio.move_on_after(400) as scope:
            await reader.wait_for(Step(0), waits=True)
        assert scope.cancelled_caught


async def test_a_sealed_lake_ends_every_wait_at_once(autojump_clock):
    shelf = await Shelf.of(SMALL, SMALL)
    async with shelf.reader(wait_s=100.0) as reader, trio.open_nursery() as nursery:
        ended = []

        async def follow() -> None:
            ended.append((await reader.wait_for(Step(2), waits=True), trio.current_time()))

        async def read() -> None:
            ended.append((await outcome_of(shelf.read, reader, 2, 0), trio.current_time()))

        nursery.start_soon(follow)
        nursery.start_soon(read)
        await trio.sleep(5)
        await shelf.seal()
        await trio.sleep(3)
        assert all(at < 9 for _, at in ended)
        by_kind = {type(found): found for found, _ in ended}
        assert by_kind[bool] is False
        assert "sealed" in str(by_kind[NoSuchStepError])
        assert await reader.wait_for(Step(1), waits=True)  # what is committed stays
        assert await reader.wait_for(Step(7), waits=True) is False


async def test_steps_beyond_the_end_of_a_sealed_lake_are_refused(autojump_clock):
    shelf = await Shelf.of(SMALL)
    await shelf.seal()
    with pytest.raises(RefusedError, match="sealed and has 1 steps"):
        async with shelf.reader(steps=range(5)):
            pass
    async with shelf.reader(steps=range(1)) as reader:
        assert await reader.wait_for(Step(0), waits=True)
        assert not await reader.wait_for(Step(1), waits=True)


async def test_following_a_view_of_some_steps_ends_with_them(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 4)
    async with shelf.reader(steps=range(1, 3)) as reader:
        found = [await reader.wait_for(Step(step), waits=True) for step in (1, 2, 3)]
        assert found == [True, True, False]
        assert isinstance(await outcome_of(reader.wait_for, Step(0), waits=True), NoSuchStepError)


async def test_reclaimed_steps_are_an_error_and_never_skipped(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    await shelf.checkpoint("train", 4)
    await shelf.reclaim()
    async with shelf.reader() as reader:
        for waits in (False, True):
            error = await outcome_of(reader.wait_for, Step(3), waits=waits)
            assert isinstance(error, ReclaimedError)
            assert "begins at step 4" in str(error)
        assert await shelf.read(reader, 4, 0) == shelf.expected(4, 0)
        assert list(reader.tree.listed()) == [4, 5]


async def test_steps_reclaimed_under_a_reader_leave_it(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    async with shelf.reader() as reader:
        assert await shelf.read(reader, 1, 0) == shelf.expected(1, 0)
        await shelf.checkpoint("train", 4)
        await shelf.reclaim()
        await shelf.commit(SMALL)
        await trio.sleep(3)
        assert isinstance(await outcome_of(shelf.read, reader, 1, 0), ReclaimedError)


async def test_steps_reclaimed_under_a_reader_of_a_quiet_lake_leave_it_within_100_s(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    async with shelf.reader() as reader:
        await trio.sleep(20)
        await shelf.checkpoint("train", 4)
        await shelf.reclaim()
        await trio.sleep(100.5)
        assert list(reader.tree.listed()) == [4, 5]


async def test_a_group_is_registered_and_keeps_what_its_reader_needs(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    await shelf.checkpoint("other", 5)
    async with shelf.reader(group="mine") as reader:
        await shelf.reclaim()
        await trio.sleep(3)
        assert await shelf.read(reader, 0, 0) == shelf.expected(0, 0)
        await shelf.checkpoint("mine", 3)  # a checkpoint anywhere moves the view here
        await trio.sleep(3)
        error = await outcome_of(shelf.read, reader, 2, 0)
        assert isinstance(error, ReclaimedError)
        assert "'mine' needs nothing below step 3" in str(error)
        await shelf.reclaim()
        assert await shelf.read(reader, 3, 0) == shelf.expected(3, 0)
        assert not [key for key in shelf.shared.objects if "/nodes/" in key], "it is not in the fleet view"


async def test_of_a_loader_with_a_group_its_workers_ask_nothing_for_it(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    async with shelf.reader(group="mine", workers=2) as reader:
        assert await shelf.read(reader, 0, 0) == shelf.expected(0, 0)
        await trio.sleep(30)
    assert await list_groups(FaultyStore(shelf.shared), shelf.identity) == {}


@pytest.mark.logs("cannot follow the lake", "the store answers again")
async def test_a_lake_recreated_under_the_url_ends_the_reader(autojump_clock):
    shelf = await Shelf.of(SMALL)

    async def run() -> None:
        async with shelf.reader(wait_s=500.0) as reader:
            shelf.shared.objects.clear()
            shelf.shared._keys.clear()
            await create_lake(FaultyStore(shelf.shared), slices=2, clock=TrioClock())
            await reader.wait_for(Step(1), waits=True)

    with pytest.raises(BaseExceptionGroup) as caught:
        await run()
    assert caught.group_contains(RefusedError, match="was replaced")


async def test_a_read_says_at_once_that_the_lake_was_replaced_or_is_gone(autojump_clock):
    shelf = await Shelf.of(SMALL)
    async with shelf.reader() as reader:
        shelf.shared.objects.clear()
        shelf.shared._keys.clear()
        error = await outcome_of(shelf.read, reader, 0, 0)
        assert isinstance(error, AbsentError)
        assert "no lake" in str(error)
        await create_lake(FaultyStore(shelf.shared), slices=2, clock=TrioClock())
        error = await outcome_of(shelf.read, reader, 0, 0)
        assert isinstance(error, RefusedError)
        assert "was replaced" in str(error)


async def test_a_store_that_does_not_deliver_is_an_error_after_the_deadline(autojump_clock):
    class Mute(FaultyStore):
        async def read_into(self, *args, **options):
            await trio.sleep_forever()

    shelf = await Shelf.of(SMALL)
    async with shelf.reader(deadline_s=10.0, store=Mute(shelf.shared, actor="reader")) as reader:
        began = trio.current_time()
        assert isinstance(await outcome_of(shelf.read, reader, 0, 0), StoreUnreachableError)
        assert trio.current_time() - began == pytest.approx(10.0, abs=1)


STEPS = 6
WAIT_S = 30


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A lake that no test changes."""
    return lake_of(tmp_path_factory.mktemp("lakes"), STEPS)


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
    if step == lake.next_step - 1:
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


def test_a_long_tail_of_wide_steps_does_not_travel_to_each_worker(tmp_path, monkeypatch):
    monkeypatch.setattr("stepfs.reader.lake._PICKLED_BYTES_MAX", 1 << 20)
    url, slices, steps = (tmp_path / "wide").as_uri(), 4096, 12
    lake_on_disk(url, slices=slices)
    commit_on_disk(url, range(steps), 1, slices=slices)
    with Lake(url) as lake:
        assert len(lake.known.tail) == steps
        travels = pickle.dumps(lake)
        assert len(travels) < 4096, "it was 100 KB a step"
        with pickle.loads(travels) as copy:
            assert copy.next_step == steps
            assert bytes(copy.read(steps - 1, slices - 1)) == bytes(lake.read(steps - 1, slices - 1))


def test_steps_of_the_parent_and_of_the_fork_are_one_sequence(tmp_path):
    parent, child = (tmp_path / "parent").as_uri(), (tmp_path / "child").as_uri()
    lake_on_disk(parent)
    commit_on_disk(parent, range(6))

    async def cut() -> None:
        stores = open_store(parent), open_store(child)
        log = await LogReader.open(stores[0], await open_lake(stores[0]))
        await fork(log, stores[1], Cut(Step(3), Step(3), Step(6)), SystemClock())
        for store in stores:
            await store.aclose()

    trio.run(cut)
    with Lake(child, ranks="0-1") as lake:
        assert lake.next_step == 3
        commit_on_disk(child, range(3, 5), 2 * SMALL)
        for step in lake.follow():
            size = SMALL if step < 3 else 2 * SMALL
            assert [step[rank] for rank in (0, 1)] == [payload(step, rank, size) for rank in (0, 1)]
            if step == 4:
                break
