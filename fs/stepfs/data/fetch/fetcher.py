"""One block from the store into memory: verified, or an error that names the object.

A fetch is a race of attempts. Usually there is one; a second starts when the first is slow (`hedge`), and the first
*verified* one wins. Attempts run in the fetcher's own nursery and own their buffers: a loser, or one that
outlived its deadline while its thread still writes, gives its buffer back itself, and the pool reuses it only when
nothing refers to it (`buffers`). So nothing is ever cancelled to be quick, and no buffer has two writers.

Unreachable means later: attempts repeat under one shared back-off until the deadline. A mismatch is fetched once
more, since a bit may have flipped in transit, before it is `CorruptError`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from stepfs.data.buffers import Buffer, Pool
from stepfs.data.counters import DataCounts
from stepfs.data.fetch.checksum import RangeCheck
from stepfs.data.fetch.concurrency import ConcurrencyLimit
from stepfs.data.fetch.hedge import HedgePolicy
from stepfs.data.fetch.throttle import Throttle
from stepfs.data.ranges import Range
from stepfs.errors import AbsentError, CorruptError, StepfsError, StoreUnreachableError
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import Descriptor
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.data")
_NO_MEMORY_S: Final = 0.1

Lease = Callable[[], Buffer | None]
StoreOf = Callable[[Descriptor], Awaitable[Store]]  # a fork's origin is looked at first: by a request that may fail


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """The bytes to fetch, and their object."""

    store_of: StoreOf
    entry: StepEntry
    range: Range

    def name_in(self, store: Store | None) -> str:
        tgb = self.entry.tgb
        return f"{f'{store.url}/' if store is not None and tgb.origin else ''}{tgb.key}: step {self.entry.step}"


@dataclass(slots=True)
class _Race:
    running: int = 0
    winner: Buffer | None = None
    error: StepfsError | None = None  # of the attempt that ended last
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(eq=False)
class Fetcher:
    """GETs of one mount: counted, hedged, throttled together."""

    pool: Pool
    counts: DataCounts
    get_timeout_s: float = 60.0  # of one GET
    deadline_s: float = 300.0  # of all attempts for one block
    concurrency: ConcurrencyLimit = field(default_factory=ConcurrencyLimit)  # learns from GETs

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

    async def fetch(self, target: FetchTarget, buffer: Buffer, lease: Lease) -> Buffer:
        """The verified bytes of a range, in `buffer` or in another from `lease`; consumes `buffer` in any case.

        `CorruptError`, `AbsentError`; `StoreUnreachableError` at the deadline.
        """
        deadline = trio.current_time() + self.deadline_s
        mismatches = 0
        attempt: Buffer | None = buffer
        while True:
            if attempt is not None:
                race = await self._race(target, attempt, lease)
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
            if attempt is None:
                await trio.sleep(_NO_MEMORY_S)

    async def _race(self, target: FetchTarget, buffer: Buffer, lease: Lease) -> _Race:
        assert self._nursery is not None
        race = _Race(running=1)
        self._nursery.start_soon(self._attempt, race, target, buffer)
        with trio.move_on_after(self.policy.delay_s(target.range.size)):
            await race.done.wait()
        if not race.done.is_set() and not self.throttle.interval_s and self.policy.spend():
            second = lease()
            if second is not None:
                self.counts.hedges += 1
                race.running += 1
                self._nursery.start_soon(self._attempt, race, target, second, True)
        await race.done.wait()
        return race

    async def _attempt(self, race: _Race, target: FetchTarget, buffer: Buffer, hedge: bool = False) -> None:
        won = False
        try:
            error = await self._get(target, buffer)
            won = error is None and race.winner is None
            race.error = error or race.error
        finally:
            race.running -= 1
            if won:
                race.winner = buffer
                self.counts.hedges_won += hedge
            else:
                self.pool.give(buffer)
            if won or not race.running:
                race.done.set()

    async def _get(self, target: FetchTarget, buffer: Buffer) -> StepfsError | None:
        """One GET, verified. The error is returned, and fresh: a traceback would keep the buffer in sight."""
        size = target.range.size
        token = await self.throttle.turn()
        began = trio.current_time()
        started = self.concurrency.start()
        took_s: float | None = None
        got: int | None = None
        store: Store | None = None
        check = RangeCheck(target.range, buffer)
        self.counts.requests += 1
        try:
            with trio.move_on_after(self.get_timeout_s) as scope:
                store = await target.store_of(target.entry.tgb)
                got = await store.read_into(target.entry.tgb.key, target.range.offset, buffer.view(), check.update)
        except StepfsError as failure:
            if isinstance(failure, StoreUnreachableError):
                self.throttle.failed(token)
            return type(failure)(*failure.args)
        else:
            if got is not None:
                took_s = trio.current_time() - began
        finally:
            self.concurrency.end(started, size, took_s)
        if scope.cancelled_caught:
            self.throttle.failed(token)
            return StoreUnreachableError(f"{target.name_in(store)}: no answer within {self.get_timeout_s:g} s")
        self.throttle.succeeded()
        if took_s is None or got is None:
            return AbsentError(f"{target.name_in(store)}: the object is gone; it was reclaimed, or the store lost it")
        self.policy.note(size, took_s)
        self.counts.fetch_seconds.observe(took_s)
        self.counts.bytes_fetched += got
        problem = check.problem(got)
        if problem is None:
            return None
        self.counts.corrupt += 1
        return CorruptError(f"{target.name_in(store)}: {problem}; restore the object, or fork the lake around the step")
