"""One block from a store that is slow, silent, wrong or away: under a virtual clock."""

from __future__ import annotations

import gc

import pytest
import trio
import trio.testing
from data_doubles import World

from stepfs.data.blocks import Block, join_pieces, pieces_of
from stepfs.data.buffers import Pool
from stepfs.data.counters import DataCounts
from stepfs.data.fetch import Fetcher, HedgePolicy, Throttle
from stepfs.data.tuning import TUNING
from stepfs.errors import CorruptError, RefusedError, StoreUnreachableError
from stepfs.format.ids import SliceIndex

MIB = 1 << 20


class Bench:
    def __init__(self, memory_bytes=64 * MIB, **options):
        self.world = World()
        self.counts = DataCounts()
        self.pool = Pool(memory_bytes)
        self.fetcher = Fetcher(self.pool, self.counts, self.store_of, **options)
        self.steps = 0

    async def store_of(self, _tgb):
        return self.world.store

    async def fetch(self, size=MIB):
        entry = self.world.add_step([size])
        (range_,) = join_pieces(pieces_of(SliceIndex(0), entry.tgb.slice(SliceIndex(0))))
        lease = lambda: self.pool.take(size)
        buffer = await self.fetcher.fetch(Block(entry, range_, []), lease(), lease)
        assert bytes(buffer.view()) == self.world.payloads[entry.step][0]
        self.pool.give(buffer)

    def settle(self):
        """Python 3.12 keeps the frames of a sleep that has ended in a cycle, and with them a view of the buffer."""
        gc.collect()
        self.pool.sweep()

    async def learn(self, seconds=0.02, count=40):
        self.world.store.behave = lambda *_: seconds
        for _ in range(count):
            await self.fetch()


async def test_a_slow_get_is_hedged_after_what_is_usual(autojump_clock):
    bench = Bench()
    async with bench.fetcher.serving():
        await bench.learn()
        first = len(bench.world.store.requests)
        bench.world.store.behave = lambda number, *_: 30.0 if number == first else 0.02
        before = trio.current_time()
        await bench.fetch()
        assert trio.current_time() - before == pytest.approx(0.1 + 0.02)
        assert (bench.counts.hedges, bench.counts.hedges_won) == (1, 1)
        assert bench.pool.used == MIB, "the loser's buffer is its own until its thread is done"
        await trio.sleep(31)
        bench.settle()
        assert bench.pool.used == 0


async def test_the_loser_of_a_hedge_never_writes_into_memory_in_use(autojump_clock):
    bench = Bench(memory_bytes=2 * MIB)
    async with bench.fetcher.serving():
        await bench.learn()
        first = len(bench.world.store.requests)
        bench.world.store.behave = lambda number, *_: 30.0 if number == first else 0.02
        await bench.fetch()
        for _ in range(20):
            await bench.fetch()  # only one buffer is left to use, over and over
        await trio.sleep(31)
        bench.settle()
        assert bench.pool.used == 0


async def test_hedges_are_a_bounded_share_even_if_everything_is_slow(autojump_clock):
    bench = Bench()
    async with bench.fetcher.serving():
        await bench.learn()
        bench.world.store.behave = lambda number, *_: 20.0 if number % 2 else 0.02
        before = bench.counts.requests
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(bench.fetch, 4096)
        extra = bench.counts.requests - before - 200
        assert bench.counts.hedges == extra
        assert extra <= 4 + TUNING.hedge_share_max * 240


async def test_unreachable_is_retried_with_one_shared_back_off(autojump_clock):
    bench = Bench()

    def behave(*_):
        if trio.current_time() < start + 20:
            raise StoreUnreachableError("connection refused")
        return 0.01

    start = trio.current_time()
    bench.world.store.behave = behave
    async with bench.fetcher.serving():
        async with trio.open_nursery() as nursery:
            for _ in range(16):
                nursery.start_soon(bench.fetch)
        assert 20 <= trio.current_time() - start < 30
        assert bench.counts.requests < 16 + 60, "sixteen fetches do not knock sixteen times as often"
        assert bench.counts.retries > 0
        assert bench.fetcher.throttle.interval_s == 0


async def test_a_hung_store_means_later_and_not_an_error(autojump_clock):
    """Twenty seconds without an answer, then everything is as before."""
    bench = Bench(get_timeout_s=8)
    start = trio.current_time()
    bench.world.store.behave = lambda *_: 1000.0 if trio.current_time() < start + 20 else 0.01
    async with bench.fetcher.serving():
        await bench.fetch()
        assert 20 <= trio.current_time() - start < 40


async def test_the_deadline_ends_it(autojump_clock):
    bench = Bench(get_timeout_s=10, deadline_s=60)
    bench.world.store.behave = lambda *_: 1000.0
    start = trio.current_time()
    async with bench.fetcher.serving():
        with pytest.raises(StoreUnreachableError, match="no answer within 10 s"):
            await bench.fetch()
        assert 60 <= trio.current_time() - start <= 90
        gc.collect()  # a cancelled call's traceback may still see its buffer
        bench.pool.sweep()
        assert bench.pool.used == 0


async def test_a_mismatch_is_fetched_once_more_and_then_said(autojump_clock):
    bench = Bench()

    def spoil(_number, buffer):
        buffer[3] ^= 0x10

    bench.world.store.spoil = spoil
    async with bench.fetcher.serving():
        with pytest.raises(CorruptError, match=r"step 0: slice 0 block 0: CRC32C [0-9a-f]{8}, committed as"):
            await bench.fetch()
        assert (bench.counts.requests, bench.counts.corrupt) == (2, 2)
        assert bench.pool.used == 0


async def test_errors_that_will_not_go_away_are_not_retried(autojump_clock):
    bench = Bench()

    def behave(*_):
        raise RefusedError("no right to read")

    bench.world.store.behave = behave
    async with bench.fetcher.serving():
        with pytest.raises(RefusedError):
            await bench.fetch()
        assert bench.counts.requests == 1


async def test_dropped_answers_cost_time_and_nothing_else(autojump_clock):
    """One response in a hundred is lost."""
    bench = Bench(get_timeout_s=10)
    bench.world.store.behave = lambda number, *_: 1000.0 if number % 100 == 7 else 0.02
    async with bench.fetcher.serving():
        for _ in range(300):
            await bench.fetch(4096)
    assert bench.counts.requests <= 300 + 2 * 3 + 1


def test_nothing_is_hedged_early_while_nothing_is_known():
    policy = HedgePolicy()
    assert policy.delay_s(MIB) == 5.0
    for _ in range(100):
        policy.note(8 * MIB, 0.4)
    assert policy.delay_s(MIB) == 5.0
    assert policy.delay_s(8 * MIB) == pytest.approx(0.6)
    policy.note(8 * MIB, 9.0)
    assert policy.p99_s(8 * MIB) == 0.4, "one outlier in a hundred is not usual"


async def test_failures_of_one_moment_count_once(autojump_clock):
    throttle = Throttle()
    tokens = [await throttle.turn() for _ in range(16)]
    for token in tokens:
        throttle.failed(token)
    assert throttle.interval_s == pytest.approx(0.1)
    for _ in range(20):
        throttle.failed(await throttle.turn())
    assert throttle.interval_s == 5.0
    for _ in range(10):
        throttle.succeeded()
    assert throttle.interval_s == 0.0


async def test_a_success_wakes_those_who_wait(autojump_clock):
    throttle = Throttle()
    for _ in range(10):
        throttle.failed(await throttle.turn())
    start = trio.current_time()

    async def waits():
        await throttle.turn()

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(waits)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(10):
            throttle.succeeded()
    assert trio.current_time() - start < 1
