"""The follower and its pace, and names withdrawn when steps leave. Virtual time."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import trio
from fakemount import Caller, mounted
from faketable import FakeTable

from stepfs._internal.clock import SystemClock
from stepfs.errors import CorruptError, StoreUnreachableError
from stepfs.follow.changes import Changes
from stepfs.follow.follower import IDENTITY_CHECK_S, SILENCE_S, Follower, ReplacedError
from stepfs.follow.polling import INTERVAL_S_MAX, PollInterval, Spacing
from stepfs.format.ids import Step
from stepfs.mount.fuse.kernel import LookupCounts, Withdrawal
from stepfs.mount.host.kernel import has_pending_signal
from stepfs.view.inodes import directory_inode
from stepfs.view.tree import Tree, ViewOptions


class PolledTable(FakeTable):
    """Commits `due` steps at the poll after their time has come."""

    def __init__(self):
        super().__init__()
        self.due: list[float] = []
        self.polls: list[float] = []
        self.skims: list[bool] = []  # of each of them
        self.errors: list[Exception] = []

    async def poll(self, published, *, skims=False) -> bool:
        await trio.lowlevel.checkpoint()
        self.polls.append(trio.current_time())
        self.skims.append(skims)
        if self.errors:
            raise self.errors.pop(0)
        come = [at for at in self.due if at <= trio.current_time()]
        self.due = self.due[len(come) :]
        if come:
            self.commit(len(come))
        return bool(come)


now_ms = SystemClock().now_ms


async def own_id():
    return FakeTable().identity.lake_id


def follow(nursery, table, changes, *, poll_s=0.1, find=own_id, now_ms=now_ms, **more):
    seen = []
    follower = Follower(
        table, changes, poll_s=poll_s, find_lake_id=find, on_change=lambda: seen.append(trio.current_time()),
        now_ms=now_ms, **more,
    )  # fmt: skip
    nursery.start_soon(follower.run)
    return follower, seen


async def test_an_idle_lake_is_looked_at_every_two_seconds_in_the_end(autojump_clock, nursery):
    table = PolledTable()
    follow(nursery, table, Changes())
    await trio.sleep(30)
    gaps = [b - a for a, b in zip(table.polls, table.polls[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert table.polls[0] == pytest.approx(0.1)
    assert gaps[-1] == pytest.approx(INTERVAL_S_MAX)


async def test_the_lag_behind_commits_is_measured_once_per_look(autojump_clock, nursery):
    table = PolledTable()
    table.due = [1.0, 1.001, 9.0]
    follower, _ = follow(nursery, table, Changes(), now_ms=lambda: table.state.time_ms + 250)
    await trio.sleep(30)
    assert (follower.lag_s.count, follower.lag_s.sum) == (2, 0.5)
    assert len(table.polls) > 2


async def test_requests_never_exceed_one_per_poll_interval(autojump_clock, nursery):
    table = PolledTable()
    table.due = [n * 0.01 for n in range(1000)]
    follow(nursery, table, Changes())
    await trio.sleep(10)
    assert len(table.polls) <= 100


async def test_a_look_that_takes_long_does_not_delay_the_next(autojump_clock, nursery):
    table = PolledTable()
    look, changes = table.poll, Changes()

    async def slowly(published, **options):
        await trio.sleep(0.06)
        return await look(published)

    table.poll = slowly
    table.due = [0.05 * number for number in range(200)]
    follow(nursery, table, changes)
    await trio.sleep(10.001)
    gaps = [b - a for a, b in zip(table.polls, table.polls[1:], strict=False)]
    assert gaps == pytest.approx([0.1] * len(gaps))
    assert len(gaps) > 90


async def test_a_reader_that_waits_makes_every_look_count(autojump_clock, nursery):
    table, changes = PolledTable(), Changes()
    follow(nursery, table, changes)
    await trio.sleep(30.3)
    table.due = [40.0]
    with changes.listening():
        began = trio.current_time()
        changed = changes.next_change
        table.polls.clear()
        await changed.wait()
        assert trio.current_time() <= 40.11
        assert table.polls[0] - began <= 0.1001  # the long sleep was cut short
        assert max(b - a for a, b in zip(table.polls, table.polls[1:], strict=False)) <= 0.1001


@pytest.mark.parametrize("every_s", [0.05, 0.5, 2, 8, 60])
async def test_a_steady_stream_is_seen_within_an_eighth_of_its_pace(autojump_clock, nursery, every_s):
    table = PolledTable()
    table.due = [every_s * n for n in range(1, 200)]
    due = list(table.due)
    _, changes = follow(nursery, table, Changes())
    await trio.sleep(every_s * 20)
    late = [min(c for c in changes if c >= at) - at for at in due[10:19]]
    assert max(late) <= max(0.11, min(INTERVAL_S_MAX, every_s / 8 * 1.2))
    if every_s >= 2:
        assert len(table.polls) / (every_s * 20) <= max(8.0 / every_s, 0.5) * 2.5  # far fewer than ten a second


def test_a_stream_that_stopped_is_not_polled_at_its_old_pace():
    pace = PollInterval(0.1)
    for number in range(20):
        pace.arrived(number * 0.2)
    for number in range(200):
        pace.idle(4 + number)
    assert pace.interval_s == INTERVAL_S_MAX


@pytest.mark.logs("cannot follow the lake", "the store answers again")
async def test_a_store_that_is_away_is_said_once_and_tried_again(autojump_clock, nursery, caplog):
    table = PolledTable()
    table.errors = [StoreUnreachableError("away")] * 20
    follower, _ = follow(nursery, table, Changes())
    await trio.sleep(10)
    assert follower.trouble == "away"
    await trio.sleep(60)
    assert follower.trouble is None
    assert [r.getMessage() for r in caplog.records].count("the store answers again") == 1
    assert len([r for r in caplog.records if "cannot follow" in r.getMessage()]) == 1


async def test_a_store_that_hangs_is_said_to_before_its_request_fails(autojump_clock, nursery):
    table = PolledTable()
    follower, _ = follow(nursery, table, Changes())
    await trio.sleep(1)
    poll, answers = table.poll, trio.Event()

    async def hang(published, **options):
        await answers.wait()
        return False

    table.poll = hang
    await trio.sleep(2 + SILENCE_S / 2)
    assert follower.trouble is None
    await trio.sleep(SILENCE_S)
    assert follower.trouble == "the store does not answer"
    scraped = ThreadPoolExecutor(1).submit(lambda: follower.trouble)  # a thread that trio knows nothing of
    assert scraped.result(10) == "the store does not answer"
    table.poll = poll
    answers.set()
    await trio.sleep(0.1)
    assert follower.trouble is None


@pytest.mark.logs("cannot follow the lake", "the store answers again")
async def test_a_corrupt_log_leaves_what_is_there_visible(autojump_clock, nursery):
    table = PolledTable()
    table.commit(3)
    table.errors = [CorruptError("log version 4 is torn")] * 3
    follower, _ = follow(nursery, table, Changes())
    await trio.sleep(1)
    assert follower.trouble == "log version 4 is torn"
    assert follower.frontier == 2
    await trio.sleep(10)


async def test_another_lake_under_the_same_url_ends_the_mount(autojump_clock):
    """Hazard 7."""

    async def other():
        return "f" * 32

    with pytest.RaisesGroup(ReplacedError):
        async with trio.open_nursery() as nursery:
            follow(nursery, PolledTable(), Changes(), find=other)
    assert IDENTITY_CHECK_S <= trio.current_time() <= IDENTITY_CHECK_S + 3


async def test_steps_that_leave_are_withdrawn_where_the_kernel_knows_them(autojump_clock, nursery):
    async with mounted() as m:
        m.commit(10)
        for number in (1, 3, 7):
            await m.lookup(f"step-{number:09d}")
        gone = []
        main = threading.get_ident()

        def invalidate(inode, name):
            assert threading.get_ident() != main
            gone.append((inode, name))
            if name.endswith(b"3"):
                raise FileNotFoundError

        withdrawal = Withdrawal(m.tree, m.known, m.meter, invalidate=invalidate)
        await nursery.start(withdrawal.run)
        m.table.first_live_step = Step(5)
        withdrawal.note()
        withdrawal.note()
        await trio.testing.wait_all_tasks_blocked()
        while m.meter.steps_invalidated < 2:  # noqa: ASYNC110 (a thread is at work, there is no event)
            await trio.sleep(0.01)
        assert gone == [(1, b"step-000000001"), (1, b"step-000000003")]
        m.tree.need = Step(8)  # the group's own checkpoint
        withdrawal.note()
        await m.ops.forget([(directory_inode(1), 1), (directory_inode(3), 1)])
        while m.meter.steps_invalidated < 3:  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert gone[-1] == (1, b"step-000000007")


def test_lookup_counts_are_exact_and_bounded_by_what_the_kernel_knows():
    known = LookupCounts()
    for number in (0, 4095, 4096, 10**12):
        known.add(Step(number))
        known.add(Step(number))
    assert len(known) == 4
    known.forget(Step(4096), 1)
    assert list(known.between(Step(0), Step(2**41))) == [0, 4095, 4096, 10**12]
    known.forget(Step(4096), 1)
    known.forget(Step(4096), 5)  # more than it ever had: nothing to take away
    known.forget(Step(77), 1)
    assert list(known.between(Step(1), Step(10**12))) == [4095]
    for number in (0, 4095, 10**12):
        known.forget(Step(number), 2)
    assert len(known) == 0
    assert not known._chunks


@pytest.mark.logs("another pid namespace")
async def test_a_caller_is_asked_by_its_thread():
    """The real /proc: a thread that blocked a signal is not let go, one that did not is."""
    me = threading.get_native_id()
    assert not has_pending_signal(me)
    assert not has_pending_signal(0)
    assert not has_pending_signal(2**22 + 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        assert not has_pending_signal(me)  # pending, but blocked: the caller does not want to hear of it
        assert signal.sigtimedwait({signal.SIGUSR2}, 1) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    assert Caller(me).pid == me


FAR_S = 3600.0  # what the readers here can go on with


def steady(every_s: float = 0.2) -> PolledTable:
    table = PolledTable()
    table.due = [every_s * number for number in range(1, 1000)]
    return table


async def test_far_from_the_frontier_a_look_may_come_late(autojump_clock, nursery):
    """Nobody waits, and nobody asks: the stream of five commits a second is looked at every two seconds."""
    table, near = steady(), steady()
    follow(nursery, table, Changes(), ahead_s=lambda: FAR_S)
    follow(nursery, near, Changes())
    await trio.sleep(60)
    assert len(near.polls) > 5 * len(table.polls)
    assert len(table.polls) == pytest.approx(60 / INTERVAL_S_MAX, abs=2)
    assert all(table.skims[1:])
    assert not any(near.skims)


async def test_in_a_run_of_many_mounts_later_by_their_number(autojump_clock, nursery):
    table = steady()
    follow(nursery, table, Changes(), ahead_s=lambda: FAR_S, spacing=Spacing(1000))
    await trio.sleep(180)
    assert 180 / 20 <= len(table.polls) <= 180 / 10 + 1


@pytest.mark.parametrize("ahead_s", [0.0, 2 * INTERVAL_S_MAX - 0.1])
async def test_readers_that_come_near_the_frontier_are_told_at_once(autojump_clock, nursery, ahead_s):
    table, near = steady(), steady()
    follow(nursery, table, Changes(), ahead_s=lambda: ahead_s)
    follow(nursery, near, Changes())
    await trio.sleep(20)
    assert table.polls == near.polls
    assert not any(table.skims)


@pytest.mark.parametrize(("mounts", "within_s"), [(1, 0.15), (1000, 2.0)])
async def test_who_waits_ends_the_late_look(autojump_clock, nursery, mounts, within_s):
    table, changes = steady(), Changes()
    follow(nursery, table, changes, ahead_s=lambda: FAR_S, spacing=Spacing(mounts))
    for _ in range(5):
        await trio.sleep(20.13)
        before = trio.current_time()
        with changes.listening():
            await changes.next_change.wait()
        assert trio.current_time() - before < within_s  # as that many mounts look
        assert not table.skims[-1]


async def test_who_asks_sees_what_is_new_half_a_second_later(autojump_clock, nursery):
    """The second `ls` of the root, or of a step that is not there."""
    table, asked = steady(), [0]
    follow(nursery, table, Changes(), ahead_s=lambda: FAR_S, asked=lambda: asked[0])
    await trio.sleep(30.3)
    polls = len(table.polls)
    asked[0] += 1
    await trio.sleep(0.6)
    assert len(table.polls) == polls + 1
    assert not table.skims[-1]
    await trio.sleep(10)
    assert table.skims[-1], "and then late again"


@pytest.mark.logs("cannot follow the lake")
async def test_while_the_store_fails_nothing_is_put_off(autojump_clock, nursery, caplog):
    table, plain = PolledTable(), PolledTable()
    for one in (table, plain):
        one.errors = [StoreUnreachableError("no answer")] * 50
    follow(nursery, table, Changes(), ahead_s=lambda: FAR_S)
    follow(nursery, plain, Changes())
    await trio.sleep(20)
    gaps, usual = ([b - a for a, b in pairwise(one.polls)] for one in (table, plain))
    assert gaps[:5] == pytest.approx(usual[:5])


def test_all_that_shows_how_far_the_lake_is_asks():
    tree = Tree(FakeTable(), ViewOptions())
    for look in (tree.listed, tree.latest, lambda: tree.presence(tree.next_step), tree.ask):
        before = tree.asked
        look()
        assert tree.asked == before + 1
