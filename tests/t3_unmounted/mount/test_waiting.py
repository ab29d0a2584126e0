"""Waiting for steps to come: pending directories, deadlines, signals, seals, callers that cannot be seen. Virtual
time.
"""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pyfuse3
import pytest
import trio
import trio.testing
from fakemount import Caller, fails, mounted
from faketable import CREATED_MS, payload

from stepfs.errors import CorruptError, ReclaimedError, StoreUnreachableError
from stepfs.format.ids import Epoch, SliceIndex, Step, Version
from stepfs.format.snapshot import ProducerState
from stepfs.mount.fuse.files import FileTable, OpenSlice
from stepfs.mount.fuse.link import TASKS_MAX
from stepfs.mount.host import kernel
from stepfs.view.inodes import slice_inode, wait_file_inode


async def test_with_wait_a_directory_beyond_the_frontier_resolves_at_once_unlisted(autojump_clock):
    async with mounted(wait_s=5) as m:
        m.commit()
        began = trio.current_time()
        found = await m.lookup("step-000000003")
        assert trio.current_time() == began
        assert (found.entry_timeout, found.attr_timeout) == (0.0, 0.0)
        assert await m.names() == [".stepfs", "step-000000000"]
        with fails(errno.ENOENT):
            await m.lookup("step-000001001")  # more than 1000 ahead


async def test_a_file_in_a_pending_directory_waits_until_the_commit(autojump_clock):
    async with mounted(wait_s=50) as m:
        m.later(7, m.commit, 3)
        assert await m.read("step-000000002", "rank-00001.pt") == payload(2, 1)
        assert trio.current_time() == pytest.approx(7)
        assert m.waits.waiting == 0


async def test_the_reason_of_a_long_wait_is_told_after_10_s_and_then_each_minute(autojump_clock, monkeypatch):
    told = []
    async with mounted(steps=range(9)) as m:
        m.commit(3)
        m.waits.tell = lambda line: told.append((trio.current_time(), line))
        m.later(9, m.commit)
        await m.read("step-000000003", "rank-00000.pt")
        assert told == [], "a wait of 9 s is none to speak of"
        producer = ProducerState("plan", Epoch(1), bytes(16), 4, b"", False, Version(4), CREATED_MS)
        m.table.state = replace(m.table.state, producers={"plan": producer})
        monkeypatch.setattr("stepfs.follow.waits.SystemClock.now_ms", lambda _: CREATED_MS + 14 * 60_000)
        began = trio.current_time()
        m.later(135, m.commit, 2)
        async with trio.open_nursery() as nursery:  # one line, of the first of those that are waited for
            for step in (5, 4):
                nursery.start_soon(m.read, f"step-{step:09d}", "rank-00000.pt")
    assert [round(at - began) for at, _ in told] == [10, 70, 130]
    assert {line for _, line in told} == {"waiting for step 4; 4 are committed; producer plan quiet for 14 min"}


async def test_listing_a_pending_directory_waits_too(autojump_clock):
    async with mounted(steps=range(3)) as m:
        m.later(1, m.commit)
        assert await m.names("step-000000000") == ["rank-00000.pt", "rank-00001.pt"]


@pytest.mark.parametrize(
    ("options", "path", "after_s"),
    [
        ({"wait_s": 5}, ("step-000000000", "rank-00000.pt"), 5),
        ({"steps": range(3)}, ("step-000000001", ".gitignore"), 0),  # nobody waits for an unknown name
    ],
)
async def test_a_wait_that_expires_is_enoent(autojump_clock, options, path, after_s):
    async with mounted(**options) as m:
        with fails(errno.ENOENT):
            await m.lookup(*path)
        assert trio.current_time() == pytest.approx(after_s)


@pytest.mark.parametrize(
    ("options", "path", "after_s", "expected"),
    [
        ({"wait_s": 5}, (".stepfs", "wait", "3"), 5, errno.ENOENT),
        ({}, (".stepfs", "wait", "3"), 300, errno.ETIMEDOUT),
        ({"steps": range(3)}, ("step-000000000", "rank-00000.pt"), 300, errno.ETIMEDOUT),
    ],
)
async def test_a_wait_file_expires_like_every_wait(autojump_clock, options, path, after_s, expected):
    async with mounted(**options) as m:
        with fails(expected):
            await m.read(*path)
        assert trio.current_time() == pytest.approx(after_s)


async def test_waiters_queued_on_the_directorys_lock_share_the_first_ones_deadline(autojump_clock):
    """The kernel sends the second LOOKUP only when the first is answered."""
    async with mounted(wait_s=5) as m:
        for _ in range(8):
            with fails(errno.ENOENT):
                await m.lookup("step-000000000", "rank-00000.pt")
        assert trio.current_time() == pytest.approx(5)
        await trio.sleep(2)  # a caller that comes back later gets a new deadline
        with fails(errno.ENOENT):
            await m.lookup("step-000000000", "rank-00000.pt")
        assert trio.current_time() == pytest.approx(12)


async def test_a_deadline_is_not_inherited_from_a_waiter_that_left_long_ago(autojump_clock):
    async with mounted(wait_s=100) as m:
        m.signalled.add(1)
        with fails(errno.EINTR):
            await m.lookup("step-000000000", "rank-00000.pt", pid=1)
        await trio.sleep(90)
        began = trio.current_time()
        with fails(errno.ENOENT):
            await m.lookup("step-000000000", "rank-00000.pt", pid=2)
        assert trio.current_time() - began == pytest.approx(100)


async def test_deadlines_are_forgotten(autojump_clock):
    async with mounted(wait_s=1) as m:
        for number in range(50):
            with fails(errno.ENOENT):
                await m.lookup(f"step-{number:09d}", "rank-00000.pt")
        assert len(m.waits._deadlines) <= 3


async def test_a_scrape_counts_waits_while_others_come(autojump_clock):
    """Its thread is another one than the loop's, which goes on in the middle of the count."""

    class Counted:
        at, idle_since = 300.0, 0.0

        @property
        def waiters(self) -> int:
            waits._deadlines.setdefault(Step(9), Counted())
            return 1

    async with mounted(wait_s=5) as m:
        waits = m.waits
        for step in (0, 1):
            waits._deadlines[Step(step)] = Counted()
        assert waits.waiting == 2


async def test_a_signalled_caller_is_let_go_within_a_fifth_of_a_second(autojump_clock):
    async with mounted(steps=range(3)) as m:
        m.later(3, m.signalled.add, 77)
        with fails(errno.EINTR):
            await m.read("step-000000000", "rank-00000.pt", pid=77)
        assert trio.current_time() <= 3.2


async def test_a_sealed_lake_ends_waits_at_once(autojump_clock):
    async with mounted(wait_s=100) as m:
        m.later(2, m.seal)
        with fails(errno.ENOENT):
            await m.lookup("step-000000000", "rank-00000.pt")
        assert trio.current_time() == pytest.approx(2)
        with fails(errno.ENOENT):
            await m.lookup("step-000000000")


async def test_a_step_reclaimed_as_it_comes_is_enoent(autojump_clock):
    async with mounted(wait_s=100) as m:
        m.later(1, setattr, m.table, "first_live_step", 5)
        m.later(1, m.commit, 5)
        with fails(errno.ENOENT):
            await m.lookup("step-000000000", "rank-00000.pt")


async def test_wait_files_block_in_read_and_give_the_directorys_name(autojump_clock):
    async with mounted() as m:
        assert await m.names(".stepfs", "wait") == []
        m.later(4, m.commit, 43)
        assert await m.read(".stepfs", "wait", "42") == b"step-000000042\n"
        assert trio.current_time() == pytest.approx(4)
        with fails(errno.ENOENT):
            await m.lookup(".stepfs", "wait", "042")


async def test_a_wait_file_times_out_and_a_seal_ends_it(autojump_clock):
    async with mounted() as m:
        with fails(errno.ETIMEDOUT):
            await m.read(".stepfs", "wait", "9")
        assert trio.current_time() == pytest.approx(300)
        m.seal()
        with fails(errno.ENOENT):
            await m.read(".stepfs", "wait", "9")


async def test_the_root_answers_while_many_wait(autojump_clock):
    async with mounted(steps=range(100)) as m:
        m.commit(2)
        async with trio.open_nursery() as nursery:
            for number in range(2, 100):
                nursery.start_soon(_ignore_errors, m.read, f"step-{number:09d}", "rank-00000.pt")
            await trio.sleep(0.05)
            assert m.waits.waiting == 98
            began = trio.current_time()
            assert len(await m.names()) == 101
            assert await m.read("step-000000001", "rank-00000.pt") == payload(1, 0)
            assert trio.current_time() == began
            nursery.cancel_scope.cancel()


async def _ignore_errors(fn, *args):
    await fn(*args)


@pytest.mark.parametrize("inode", [wait_file_inode(Step(70)), slice_inode(Step(70), SliceIndex(0))])
async def test_no_user_can_take_all_requests_with_waits(autojump_clock, inode):
    """No request is read while `TASKS_MAX` of them are held."""
    refused: Counter[tuple[int, int]] = Counter()

    async def wait(m, uid: int) -> None:
        try:
            await m.ops.open(inode, 0, Caller(uid=uid))
        except pyfuse3.FUSEError as error:
            refused[uid, error.errno] += 1

    async with mounted(steps=range(100)) as m, trio.open_nursery() as nursery:
        m.commit(2)
        for _ in range(TASKS_MAX + 1):
            nursery.start_soon(wait, m, 65534)
        await trio.testing.wait_all_tasks_blocked()
        assert TASKS_MAX // 4 < m.waits.waiting < TASKS_MAX // 2
        for uid in range(100):
            nursery.start_soon(wait, m, uid)
        await trio.testing.wait_all_tasks_blocked()
        assert list(refused) == [(65534, errno.EAGAIN)]
        assert m.waits.waiting + refused.total() == TASKS_MAX + 101
        m.commit(69)  # and a user who was refused may wait again
        await trio.testing.wait_all_tasks_blocked()
        assert m.waits.waiting == 0
        with trio.move_on_after(1):
            await m.ops.open(slice_inode(Step(80), SliceIndex(0)), 0, Caller(uid=65534))


@pytest.mark.parametrize(
    ("options", "failures", "at_least_s"),
    [({}, 2, 0), ({"wait_s": 1}, 20, 5)],  # `wait_s` bounds the wait for a commit, not that for its segment
)
async def test_a_segment_that_cannot_be_read_is_tried_until_the_store_is_back(
    autojump_clock, options, failures, at_least_s
):
    async with mounted(**options) as m:
        m.commit()
        m.table.unloaded = {0}
        m.table.load_errors = [StoreUnreachableError("away")] * failures
        assert await m.read("step-000000000", "rank-00000.pt") == payload(0, 0)
        assert len(m.table.loads) == failures + 1
        assert trio.current_time() > at_least_s


@pytest.mark.logs("lookup.* failed: segment is rotten")
@pytest.mark.parametrize(
    ("errors", "code", "after_s"),
    [
        ([StoreUnreachableError("away")] * 1000, errno.ETIMEDOUT, 10),
        ([CorruptError("segment is rotten")], errno.EIO, 0),
        ([ReclaimedError("reclaimed")], errno.ENOENT, 0),  # while its index is asked for
    ],
    ids=["away", "corrupt", "reclaimed"],
)
async def test_a_segment_that_stays_unreadable_fails_with_its_reason(autojump_clock, errors, code, after_s):
    async with mounted(deadline_s=10) as m:
        m.commit()
        m.table.unloaded = {0}
        m.table.load_errors = errors
        with fails(code):
            await m.lookup("step-000000000", "rank-00000.pt")
        assert trio.current_time() == pytest.approx(after_s, abs=1)


async def test_a_killed_reader_leaves_a_load_that_others_wait_for_alone(autojump_clock):
    async with mounted() as m:
        m.commit()
        m.table.unloaded = {0}
        m.table.load_gate = trio.Event()
        m.signalled.add(1)
        async with trio.open_nursery() as nursery:
            got = []

            @nursery.start_soon
            async def _patient():
                got.append(await m.read("step-000000000", "rank-00000.pt", pid=2))

            await trio.testing.wait_all_tasks_blocked()
            with fails(errno.EINTR):
                await m.lookup("step-000000000", "rank-00000.pt", pid=1)
            m.table.load_gate.set()
        assert got == [payload(0, 0)]
        assert m.table.loads == [0]


@pytest.mark.logs("another pid namespace")
def test_a_caller_that_cannot_be_seen_is_said_once(caplog):
    kernel._say_that_callers_are_hidden.cache_clear()
    assert [kernel.has_pending_signal(0) for _ in range(3)] == [False] * 3
    assert [record.getMessage() for record in caplog.records if "pid namespace" in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert "shareProcessNamespace" in caplog.text
    kernel._say_that_callers_are_hidden.cache_clear()


@pytest.mark.parametrize(("callers", "of_each", "looks_at_most"), [(1, 64, 120), (64, 1, 64 * 10 + 2100)])
async def test_many_waiting_callers_are_looked_at_a_bounded_number_of_times(
    callers, of_each, looks_at_most, autojump_clock, monkeypatch
):
    """Ten times a second each, but all together no more than 200 times; besides once when a request comes."""
    looks = []
    async with mounted(wait_s=10) as m:
        monkeypatch.setattr(m.waits, "has_signal", lambda pid: looks.append(pid) or False)
        async with trio.open_nursery() as nursery:
            for pid in range(1, callers + 1):
                for _ in range(of_each):
                    nursery.start_soon(m.waits.for_commit, 3, pid)
        assert set(looks) == set(range(1, callers + 1))
        assert len(looks) <= looks_at_most + callers * of_each


async def test_a_killed_caller_leaves_and_another_one_of_the_same_step_stays(autojump_clock, monkeypatch):
    killed: set[int] = set()
    outcomes = {}
    async with mounted(wait_s=10) as m:
        monkeypatch.setattr(m.waits, "has_signal", lambda pid: pid in killed)

        async def wait(pid: int) -> None:
            outcomes[pid] = (await m.waits.for_commit(3, pid)).value, trio.current_time()

        async with trio.open_nursery() as nursery:
            for pid in (1, 2):
                nursery.start_soon(wait, pid)
            await trio.sleep(5)
            killed.add(1)
    assert outcomes[1] == ("interrupted", pytest.approx(5.1, abs=0.11))
    assert outcomes[2] == ("expired", pytest.approx(10))


def test_the_entry_of_an_open_slice_is_found_without_a_walk_until_its_last_handle_is_closed():
    table = FileTable()
    entry = SimpleNamespace(step=7)
    opened = [OpenSlice(SimpleNamespace(close=lambda: None), entry, 3, 0) for _ in range(2)]
    handles = [table.add(slice_inode(7, 3), file) for file in opened]
    assert table.entry_of(7, 3) is entry
    assert table.entry_of(7, 2) is None
    table.release(handles[0])
    assert table.entry_of(7, 3) is entry
    table.release(handles[1])
    assert table.entry_of(7, 3) is None
    assert not table.opened
