"""Which block is fetched next, how many at a time, and how: from the disk cache, a nearer place, else the store.

Demands of open files come first, those nearest to their reader, and keep a quarter of the connections; then the requests
for later steps, planned as late as possible so that neighbours are joined in one GET.
"""

import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import fmean
from typing import Final

import trio

from stepfs._internal import tracing
from stepfs.data.blocks import Block, CachedSlice, Range, RangeCheck, State
from stepfs.data.buffers import Buffer, Pool
from stepfs.data.circuit_breaker import Attempt
from stepfs.data.counters import DataCounts
from stepfs.data.disk_cache import WriteBehind
from stepfs.data.memory_cache import Cache
from stepfs.data.near import Answer, Near
from stepfs.data.tuning import TUNING
from stepfs.data.waiting import Cause
from stepfs.errors import AbsentError, CorruptError, StepfsError, StoreUnreachableError
from stepfs.format.ids import SliceIndex, SliceKey, Step
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import Descriptor
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.data")

CONNECTIONS_MAX: Final = 64

Seconds = Mapping[int, float]  # mean latency by size class


Started = tuple[int, int]  # number of a GET, and changes of the limit before it

Lease = Callable[[], Buffer | None]
Again = Callable[[Buffer], Awaitable[Answer]]
StoreOf = Callable[[Descriptor], Awaitable[Store]]  # a fork's origin is looked at first: by a request that may fail
PrefetchRequest = tuple[StepEntry, Sequence[SliceIndex]]


class ConcurrencyLimit:
    """The limit, and the GETs that it is learned from. Plain state, no I/O, no clock."""

    def __init__(
        self,
        limit_max: int = CONNECTIONS_MAX,
        *,
        first: int = TUNING.connections_min,
        growth: float = 2.0,
        fixed: bool = False,
    ) -> None:
        """The limit is `first`, until `growth` times as many, or fewer, turn out better; never above `limit_max`. `fixed`: always
        `limit_max`.
        """
        self.limit_max = limit_max
        self.limit = limit_max if fixed else min(first, limit_max)
        self.fixed = fixed
        self._limit_min = limit_max if fixed else min(TUNING.connections_min, limit_max)
        self._running = 0
        self._starts = 0
        self._loaded_at = 0  # number of the last GET that found the limit nearly reached
        self._changes = 0
        self._factor = growth  # of the next step
        self._before: tuple[int, Seconds] | None = None  # the limit before the last step, and its latency
        self._hold = 1  # rounds until the next step; in the first all readers wait for their first blocks
        self._round: dict[int, list[float]] = {}
        self._loaded_blocks = 0  # in this round
        self._awaited_blocks = 0  # of these, came while a reader was waiting

    def start(self) -> Started:
        """Note the start of a GET; pass the result to `end`."""
        self._running += 1
        self._starts += 1
        if self._running >= TUNING.round_loaded_share * self.limit:
            self._loaded_at = self._starts
        return self._starts, self._changes

    def end(self, started: Started, size: int, seconds: float | None) -> None:
        """Note the end of a GET of `size` bytes after `seconds`; None: it failed, and its latency is not used."""
        self._running -= 1
        if seconds is None or started[1] != self._changes or self._loaded_at < started[0]:
            return
        self._round.setdefault(size.bit_length(), []).append(seconds)
        if sum(map(len, self._round.values())) >= max(TUNING.round_samples_min, self.limit):
            latency = {size: fmean(samples) for size, samples in self._round.items()}
            self._round = {}
            self._end_round(latency)

    def note_loaded(self, *, readers_wait: bool) -> None:
        """A block has come, while some reader waited for bytes or while none did."""
        self._loaded_blocks += 1
        self._awaited_blocks += readers_wait

    def _end_round(self, latency: Seconds) -> None:
        keeps_up = self._awaited_blocks < TUNING.limit_awaited_share * self._loaded_blocks
        self._loaded_blocks = self._awaited_blocks = 0
        if self._before is not None:
            before, growth = self._before[0], self.limit / self._before[0]
            worth = 1 + TUNING.limit_gain_share * (growth - 1) if growth > 1 else 1 - TUNING.limit_loss_max
            gain = growth / _slowdown(self._before[1], latency)
            self._before = None
            if gain < worth:
                self._turn(TUNING.limit_down if growth > 1 else TUNING.limit_up)
                self._set(before)
                return
        if self._hold:
            self._hold -= 1
            return
        limit = max(self._limit_min, min(self.limit_max, round(self.limit * self._factor)))
        if limit > self.limit and keeps_up:
            return
        if limit == self.limit:
            self._turn(TUNING.limit_down if self._factor > 1 else TUNING.limit_up)
        else:
            self._before = self.limit, latency
            self._set(limit)

    def _turn(self, factor: float) -> None:
        """Hold still for a while, then look in the other direction."""
        self._factor, self._hold = factor, TUNING.limit_hold_rounds

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._changes += 1


def _slowdown(before: Seconds, now: Seconds) -> float:
    """How many times as long a GET takes, over the sizes that are known from both rounds; 1 if there are none."""
    ratios = [now[size] / before[size] for size in before.keys() & now.keys() if before[size] > 0]
    return max(fmean(ratios), 1e-6) if ratios else 1.0


class HedgePolicy:
    """Latencies seen, and the budget of second requests."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._credit = TUNING.hedge_burst

    def note(self, size: int, seconds: float) -> None:
        """A GET of `size` bytes took this long. Also earns the credit that hedges spend."""
        self._seconds.setdefault(_class(size), deque(maxlen=TUNING.hedge_samples)).append(seconds)
        self._credit = min(TUNING.hedge_burst, self._credit + TUNING.hedge_share_max)

    def p99_s(self, size: int) -> float | None:
        """Usual worst latency of such a GET; None while too little is known."""
        samples = self._seconds.get(_class(size))
        if samples is None or len(samples) < TUNING.hedge_samples_min:
            return None
        return sorted(samples)[-1 - len(samples) // 100]

    def delay_s(self, size: int) -> float:
        usual = self.p99_s(size)
        if usual is None:
            return TUNING.hedge_unknown_s
        return min(max(usual * TUNING.hedge_margin, TUNING.hedge_min_s), TUNING.hedge_max_s)

    def spend(self) -> bool:
        """Take the credit for one hedge; False when the budget is spent."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True


def _class(size: int) -> int:
    return size.bit_length() // 3  # 512 KiB … 4 MiB, 4 MiB … 32 MiB, …


class Throttle:
    """Lets at most one request start per `interval_s`, which is 0 while the store is well."""

    def __init__(self) -> None:
        self.interval_s = 0.0
        self.cause = Cause.UNREACHABLE  # of the interval
        self._next_at = 0.0
        self._round = 0
        self._changed = trio.Event()

    async def turn(self) -> int:
        """Wait until a request may start; returns the token to report its outcome with."""
        while (wait := self._next_at - trio.current_time()) > 0:
            with trio.move_on_after(wait):
                await self._changed.wait()
        self._next_at = trio.current_time() + self.interval_s
        return self._round

    def failed(self, token: int, cause: Cause = Cause.UNREACHABLE) -> None:
        """The request could not reach the store, or was sent away."""
        self.cause = cause
        if token == self._round:
            self._round += 1
            self.interval_s = min(max(self.interval_s * 2, TUNING.throttle_first_s), TUNING.throttle_max_s)
            self._next_at = trio.current_time() + self.interval_s

    def succeeded(self) -> None:
        if self.interval_s:
            self.interval_s = self.interval_s / 2 if self.interval_s > TUNING.throttle_first_s else 0.0
            self._next_at = min(self._next_at, trio.current_time() + self.interval_s)
            self._changed.set()
            self._changed = trio.Event()


@dataclass(slots=True)
class _Race:
    running: int = 0
    winner: Buffer | None = None
    error: StepfsError | None = None  # of the attempt that ended last
    throttled: bool = False
    retry: int = 0  # attempts for this block before it
    done: trio.Event = field(default_factory=trio.Event)

    @property
    def trouble(self) -> Cause | None:
        """What of the store has made it long."""
        if self.throttled:
            return Cause.THROTTLED
        failed = self.winner is None and isinstance(self.error, StoreUnreachableError)
        return Cause.UNREACHABLE if failed else None


@dataclass(eq=False)
class Fetcher:
    """GETs of one mount: counted, hedged, throttled together."""

    pool: Pool
    counts: DataCounts
    store_of: StoreOf
    get_timeout_s: float = 60.0  # of one GET
    deadline_s: float = 300.0  # of all attempts for one block
    concurrency: ConcurrencyLimit = field(default_factory=ConcurrencyLimit)  # learns from GETs
    throttled: Callable[[], int] = lambda: 0  # answers of the store that ask for fewer requests

    def __post_init__(self) -> None:
        self.policy = HedgePolicy()
        self.throttle = Throttle()
        self._nursery: trio.Nursery | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None, None]:
        """The context in which attempts run; call `fetch` only inside, and wait for it before leaving."""
        async with trio.open_nursery() as self._nursery:
            yield
            self._nursery.cancel_scope.cancel()

    def start_soon(self, call: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Among the attempts: outlives whoever starts it."""
        assert self._nursery is not None
        self._nursery.start_soon(call, *arguments)

    async def fetch(self, block: Block, buffer: Buffer | None, lease: Lease, again: Again | None = None) -> Buffer:
        """The verified bytes of a block, in `buffer` or in another from `lease`; consumes `buffer` in any case. Where the
        store does not answer, `again` is asked before the next attempt.

        `CorruptError`, `AbsentError`; `StoreUnreachableError` at the deadline.
        """
        began = trio.current_time()
        deadline = began + self.deadline_s
        mismatches = retries = 0
        attempt = buffer or lease()
        error: StepfsError | None = None
        while True:
            if attempt is not None:
                race = await self._race(block, attempt, lease, retries)
                retries += 1
                if race.winner is not None:
                    return race.winner
                error = race.error
                assert error is not None
                mismatches += isinstance(error, CorruptError)
                if mismatches > 1 or not isinstance(error, (CorruptError, StoreUnreachableError)):
                    raise error
                if trio.current_time() >= deadline:
                    raise error
                _log.info("%s; trying again", error)
                self.counts.retries += 1
            attempt = lease()
            if attempt is not None and again is not None and isinstance(error, StoreUnreachableError):
                answer = await again(attempt)
                if answer is Answer.BYTES:
                    return attempt
                if answer is Answer.LATE:
                    attempt = lease()
            if attempt is None:
                block.enter(Cause.MEMORY)
                await self._wait_for_memory(block.step, began)

    async def _wait_for_memory(self, step: Step, began_s: float) -> None:
        waited_s = trio.current_time() - began_s
        if waited_s >= self.deadline_s:
            raise StoreUnreachableError(f"step {step} has had no memory for {self.deadline_s:g} s; raise --memory")
        _tell_memory(waited_s, step)
        await trio.sleep(TUNING.memory_poll_s)

    async def _race(self, block: Block, buffer: Buffer, lease: Lease, retry: int) -> _Race:
        assert self._nursery is not None
        entry, range_ = block.entry, block.range
        block.enter(self.throttle.cause if self.throttle.interval_s else Cause.STORE)
        race = _Race(running=1, retry=retry)
        self._nursery.start_soon(self._attempt, race, entry, range_, buffer)
        with trio.move_on_after(self.policy.delay_s(range_.size)):
            await race.done.wait()
        if not race.done.is_set() and not self.throttle.interval_s and self.policy.spend():
            second = lease()
            if second is not None:
                self.counts.hedges += 1
                race.running += 1
                self._nursery.start_soon(self._attempt, race, entry, range_, second, True)
        await race.done.wait()
        if race.trouble is not None:
            block.recast(race.trouble)
        return race

    async def _attempt(self, race: _Race, entry: StepEntry, range_: Range, buffer: Buffer, hedge: bool = False) -> None:
        won, began_s = False, trio.current_time()
        try:
            error = await self._get(race, entry, range_, buffer)
            won = error is None and race.winner is None
            race.error = error or race.error
            if tracing.ring is not None:
                took_s, slices = trio.current_time() - began_s, sorted({int(piece.index) for piece in range_.pieces})
                tracing.ring.add(
                    "fetches", f"GET step {entry.step}", took_s, step=entry.step, slices=slices, size=range_.size,
                    offset=range_.offset, hedge=hedge, retry=race.retry, error=error and type(error).__name__,
                )  # fmt: skip
        finally:
            race.running -= 1
            if won:
                race.winner = buffer
                self.counts.hedges_won += hedge
            else:
                self.pool.give(buffer)
            if won or not race.running:
                race.done.set()

    async def _get(self, race: _Race, entry: StepEntry, range_: Range, buffer: Buffer) -> StepfsError | None:
        """One GET, verified. The error is returned, and fresh: a traceback would keep the buffer in sight."""
        tgb, size = entry.tgb, range_.size
        name = f"{tgb.key}: step {entry.step}"
        token = await self.throttle.turn()
        began = trio.current_time()
        started = self.concurrency.start()
        took_s: float | None = None
        got: int | None = None
        check = RangeCheck(range_, buffer)
        self.counts.requests += 1
        throttled = self.throttled()
        try:
            with trio.move_on_after(self.get_timeout_s) as scope:
                store = await self.store_of(tgb)
                name = f"{store.url}/{name}" if tgb.origin else name
                got = await store.read_into(tgb.key, range_.offset, buffer.view(), check.update)
        except StepfsError as failure:
            if isinstance(failure, StoreUnreachableError):
                told = self.throttled() > throttled
                self.throttle.failed(token, Cause.THROTTLED if told else Cause.UNREACHABLE)
            return type(failure)(*failure.args)
        else:
            if got is not None:
                took_s = trio.current_time() - began
        finally:
            self.concurrency.end(started, size, took_s)
            race.throttled |= self.throttled() > throttled
        if scope.cancelled_caught:
            self.throttle.failed(token)
            return StoreUnreachableError(f"{name}: no answer within {self.get_timeout_s:g} s")
        self.throttle.succeeded()
        if took_s is None or got is None:
            return AbsentError(f"{name}: the object is gone; it was reclaimed, or the store lost it")
        self.policy.note(size, took_s)
        self.counts.fetch_seconds.observe(took_s)
        self.counts.bytes_fetched += got
        problem = check.problem(got)
        if problem is None:
            return None
        self.counts.corrupt += 1
        return CorruptError(f"{name}: {problem}; `stepfs verify` says how to restore it, or go around the step")


def _tell_memory(waited_s: float, step: Step) -> None:
    if waited_s >= TUNING.memory_told_s:
        text = "step %d has waited %.0f s for memory: what is read now takes all of it; raise --memory"
        _log.warning(text, step, waited_s, extra={"alike": "memory"})


@dataclass(eq=False)
class FetchQueue:
    """The queue of blocks to fetch."""

    cache: Cache
    on_disk: Callable[[CachedSlice], bool]
    primed: Callable[[], Container[SliceKey]]

    def __post_init__(self) -> None:
        self._demands: dict[Step, tuple[StepEntry, set[SliceIndex]]] = {}
        self.prefetch_requests: list[PrefetchRequest] = []
        self._planned = 0  # requests before it were planned
        self._served_since: set[SliceKey] = set()  # demanded or read, since the requests were made
        self._rest: dict[SliceKey, float] = {}
        self._queue: list[Block] = []

    def demand(self, held: CachedSlice) -> None:
        """An open file needs all of this slice."""
        self._demands.setdefault(held.entry.step, (held.entry, set()))[1].add(held.index)
        self.note_reading(held)

    def note_reading(self, held: CachedSlice) -> None:
        """A reader has the slice, or demands it. One that only opens it, to look or to map it, takes nothing."""
        self._served_since.add(held.key)

    def closed(self, held: CachedSlice) -> None:
        """The last reader closed it: drop fetches that have not started, unless the file was only looked at."""
        if held.entry.step in self._demands:
            self._demands[held.entry.step][1].discard(held.index)
        if held.key in self._served_since:
            for block in self._queue:
                if held in block.owners and block.state is State.QUEUED and not block.pinned:
                    self.cache.drop(block)

    def prefetch(self, prefetch_requests: Iterable[PrefetchRequest]) -> set[SliceKey]:
        """Replace the prefetch requests, nearest first; drops the blocks of former ones. Returns the requested slices."""
        self.prefetch_requests = list(prefetch_requests)
        self._planned = 0
        self._served_since.clear()
        requested = {(entry.step, index) for entry, indices in self.prefetch_requests for index in indices}
        for block in self._queue:
            if block.state is State.QUEUED and not block.pinned:
                self.cache.drop(block)  # it may be read last now: waiting for memory, it would hold up all others
        return requested

    def replan(self) -> None:
        """A block that was in memory, or counted as such, is gone: look at all requests again."""
        self._planned = 0

    def forget_below(self, step: Step) -> None:
        self.prefetch_requests = [request for request in self.prefetch_requests if request[0].step >= step]
        self._planned = 0

    def failed(self, block: Block) -> None:
        """The block cannot be had now; only readers try again at once."""
        for owner in block.owners:
            self._rest[owner.key] = trio.current_time() + TUNING.failed_rest_s

    def split(self, block: Block) -> None:
        self._queue += self.cache.split(block)

    def is_begun(self) -> bool:
        """Whether a block is queued of a slice that nobody opened, and of which others have come."""
        return any(b.state is State.QUEUED and not b.pinned and _is_begun(b) for b in self._queue)

    def next(self, *, prefetch: bool, in_order: int, begun_alone: bool = False) -> Block | None:
        """The most urgent block, still queued; with `prefetch`, not only for open files. Of an open slice at most
        `in_order` blocks are under way, and nothing is fetched ahead while others of it are held back. `begun_alone`: of
        slices that nobody opened those alone of which others have come.
        """
        for entry, indices in self._demands.values():
            also = [request for request in self.prefetch_requests if request[0].step == entry.step]
            self._plan(entry, indices.union(*map(self._outstanding, also)))
        self._demands.clear()
        self._queue = [block for block in self._queue if block.state is State.QUEUED]
        while prefetch and not begun_alone and not self._queue and self._planned < len(self.prefetch_requests):
            request = self.prefetch_requests[self._planned]
            self._planned += 1
            self._plan(request[0], self._outstanding(request))
        ready = [b for b in self._queue if b.owners[0].loading < in_order or not b.pinned or b.waiting]
        prefetch = prefetch and len(ready) == len(self._queue)
        if begun_alone:
            ready = [b for b in ready if b.pinned or _is_begun(b)]
        block = min(ready, key=_urgency, default=None)
        return block if block is not None and (block.pinned or prefetch) else None

    def _plan(self, entry: StepEntry, indices: Iterable[SliceIndex]) -> None:
        self.cache.lower_floor(entry.step)
        fetched = []
        for index in indices:
            if self.on_disk(self.cache.get_or_add(entry, index)):
                self._queue += self.cache.plan(entry, [index])  # a file each
            else:
                fetched.append(index)
        self._queue += self.cache.plan(entry, fetched)

    def _outstanding(self, request: PrefetchRequest) -> list[SliceIndex]:
        """The slices of a request that are neither served since, nor resting after a failure, nor in the page cache."""
        entry, requested = request
        step, served_since, primed = entry.step, self._served_since, self.primed()
        outstanding = [
            index for index in requested if (step, index) not in primed and (step, index) not in served_since
        ]
        if self._rest:
            now = trio.current_time()
            self._rest = {key: until for key, until in self._rest.items() if until > now}
            outstanding = [index for index in outstanding if (step, index) not in self._rest]
        return outstanding


def _is_begun(block: Block) -> bool:
    places = (place for owner in block.owners for place in owner.places)
    return any(place is not None and place.state in {State.FETCHING, State.READY} for place in places)


def _urgency(block: Block) -> tuple[int, int, int]:
    """Smallest first: a reader is blocked on it; of an open file, nearest to where it is read; the nearest step."""
    if block.waiting:
        return 0, 0, 0
    if block.pinned:
        piece = block.range.pieces[0]
        ahead = piece.block - min(owner.reading for owner in block.owners)
        return 1, 0 if ahead >= 0 else 1, abs(ahead)
    return 2, block.step, block.range.offset


@dataclass(eq=False)
class BlockLoader:
    """The loads of one mount."""

    cache: Cache
    queue: FetchQueue
    disk_copies: WriteBehind
    counts: DataCounts
    fetcher: Fetcher
    concurrency: ConcurrencyLimit  # of the loads under way
    loaded: Callable[[Block], None]  # called for each block that became READY
    near: Near | None = None
    readers_waiting: int = 0  # blocked on a block

    def __post_init__(self) -> None:
        self.planned = trio.Event()  # set and replaced after each look at the queue
        self._in_order = ConcurrencyLimit(
            self.concurrency.limit_max,
            first=TUNING.in_order_first,
            growth=TUNING.in_order_growth,
            fixed=self.concurrency.fixed,
        )
        self.settling = False  # no slice is begun ahead
        self._active: list[Block] = []
        self._short_since_s = inf  # of memory, without a load that could begin
        self._absent: set[Block] = set()  # wait for their copy at the nearer place
        self._wake = trio.Event()

    def notify(self) -> None:
        """The queue, or the memory that is free, may have changed."""
        self._wake.set()

    async def settle(self) -> None:
        """Begin no slice ahead any more, and return once those that were begun have come."""
        self.settling = True
        self.notify()
        while self.queue.is_begun() or not all(block.pinned or block in self._absent for block in self._active):
            await self._wake.wait()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                if self._wake.is_set():  # whoever else waits for it would wait in vain
                    self._wake = trio.Event()
                short, wait_s = self._start_loads(nursery), inf
                self._short_since_s = inf if short is None else min(self._short_since_s, trio.current_time())
                if short is not None and short.short_s is None:
                    short.short_s = trio.current_time()
                if short is not None:
                    poll = self.cache.pool.lingering or self.cache.pool.refused
                    wait_s = TUNING.memory_poll_s if poll else TUNING.memory_told_s
                    if short.waiting:
                        _tell_memory(trio.current_time() - self._short_since_s, short.step)
                with trio.move_on_after(wait_s):
                    await self._wake.wait()

    def _start_loads(self, nursery: trio.Nursery) -> Block | None:
        """Start as many fetches as connections and memory allow. Returns the next block if memory is the limit."""
        limit = self.concurrency.limit
        prefetches = max(1, limit - limit // 4)
        while len(self._active) < limit:
            ahead = len(self._active) < prefetches
            block = self.queue.next(prefetch=ahead, in_order=self._in_order.limit, begun_alone=self.settling)
            self.planned.set()
            self.planned = trio.Event()
            buffer = None if block is None else self.cache.lease(block.range.size, block)
            if block is None or buffer is None:
                return block
            self._short_since_s = inf
            block.begin()
            self._active.append(block)
            for owner in block.owners:
                owner.loading += 1
            nursery.start_soon(self._load, block, buffer)
        return None

    async def _load(self, block: Block, buffer: Buffer) -> None:
        loaded: Buffer | None = None
        began = trio.current_time()
        in_order = block.pinned and len(block.owners[0].places) > 1  # one of several blocks of an open slice
        learns = self._in_order.start() if in_order else None
        try:
            loaded = await self._bytes_of(block, buffer)
        except StepfsError as error:
            self._failed(block, error)
        finally:
            self._active.remove(block)
            for owner in block.owners:
                owner.loading -= 1
            if learns is not None:
                took_s = None if loaded is None else trio.current_time() - began
                self._in_order.note_loaded(readers_wait=self.readers_waiting > 0)
                self._in_order.end(learns, block.range.size, took_s)
            self.notify()
        if loaded is None:
            return
        self.concurrency.note_loaded(readers_wait=self.readers_waiting > 0)
        if block.state is not State.FETCHING:
            self.cache.pool.give(loaded)  # forgotten meanwhile
            return
        self.cache.ready(block, loaded)
        self.loaded(block)

    async def _bytes_of(self, block: Block, buffer: Buffer) -> Buffer:
        """The verified bytes, in `buffer` or in another one in its place. Any exception consumes `buffer`."""
        again: Again | None = None
        answer = await self._load_copy(block, buffer) if self.cache.copied(block) else Answer.ABSENT
        if self.near is not None and answer not in {Answer.BYTES, Answer.LATE}:
            answer = await self._load_near(self.near, block, buffer)
            again = partial(self.near.load, block, insists=True)
        if answer is Answer.BYTES:
            return buffer
        left = None if answer is Answer.LATE else buffer
        lease = partial(self.cache.lease, block.range.size, block)
        return await self.fetcher.fetch(block, left, lease, again)

    async def _load_near(self, near: Near, block: Block, buffer: Buffer) -> Answer:
        """Ask the nearer place. A block that nobody opened yet waits there for its copy, which is made after the commit."""
        until_s = trio.current_time() + TUNING.near_absent_s
        pause_s = TUNING.near_look_s

        def waits() -> bool:
            return block.state is State.FETCHING and not block.pinned and near.may_come(block.step)

        block.enter(Cause.NEAR)
        while True:
            answer = await self._ask_near(near, block, buffer)
            if answer is not Answer.ABSENT:
                return answer
            look_s = min(trio.current_time() + pause_s, until_s)
            self._absent.add(block)
            if self.settling:
                self.notify()  # nobody waits for it any more
            while waits() and trio.current_time() < look_s:
                with trio.move_on_at(look_s):
                    await self._wake.wait()  # somebody may have opened it
            self._absent.discard(block)
            if not waits() or trio.current_time() >= until_s:
                waited_s = TUNING.near_absent_s - (until_s - trio.current_time())
                if waited_s > 0:
                    near.waited(waited_s)
                return answer
            pause_s *= 2

    async def _ask_near(self, near: Near, block: Block, buffer: Buffer) -> Answer:
        """One request, from which the limit of connections learns."""
        began_s, started = trio.current_time(), self.concurrency.start()
        took_s: float | None = None
        try:
            answer = await near.load(block, buffer)
            if answer is Answer.BYTES:
                took_s = trio.current_time() - began_s
            return answer
        finally:
            self.concurrency.end(started, block.range.size, took_s)

    async def _load_copy(self, block: Block, buffer: Buffer) -> Answer:
        """Load a block from disk into `buffer`; a damaged file is removed."""
        block.enter(Cause.DISK)
        owner = block.owners[0]
        attempt = Attempt(buffer, RangeCheck(block.range, buffer))
        await self.disk_copies.load(owner, block.range.offset - owner.ref.offset, attempt)
        if attempt.late or attempt.got is None:
            return Answer.LATE if attempt.late else Answer.NONE
        problem = attempt.check.problem(attempt.got)
        if problem is not None:
            self.disk_copies.reject(owner, problem)
            return Answer.NONE
        self.counts.disk_hits += 1
        return Answer.BYTES

    def _failed(self, block: Block, error: StepfsError) -> None:
        if block.state is State.FETCHING:
            if isinstance(error, CorruptError) and len(block.owners) > 1:
                self.queue.split(block)  # only some of them are damaged
                return
            if not block.pinned and not isinstance(error, StoreUnreachableError):
                # Else a reader gets the error.
                _log.warning("%s", error, extra={"alike": (type(error), str(error))})
            self.queue.failed(block)
            self.cache.fail(block, error)
