"""Loads queued blocks into memory, as many at a time as the store is worth (`concurrency`) and the budget allows.

Demand keeps a quarter of the connections for itself, so that a reader never waits behind a prefetch. How many blocks of one
open slice are under way is learned apart, from these loads alone: few, so that they come in order, until more turn out
to deliver more (a store far away).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from stepfs.data.blocks import Block, State
from stepfs.data.buffers import Buffer
from stepfs.data.cache.memory import Cache
from stepfs.data.fetch.concurrency import ConcurrencyLimit
from stepfs.data.queue import FetchQueue
from stepfs.data.sources import Sources
from stepfs.errors import StepfsError, StoreUnreachableError

_log = logging.getLogger("stepfs.data")
_IN_ORDER_FIRST: Final = 4
_IN_ORDER_GROWTH: Final = (
    1.5  # on a full link GETs take no longer than a second request waits for (`fetch.hedge`)
)
_MEMORY_POLL_S: Final = 0.05  # memory still seen by a reader or an abandoned thread returns without a signal


class BlockLoader:
    """The loads of one mount."""

    def __init__(
        self,
        cache: Cache,
        queue: FetchQueue,
        sources: Sources,
        *,
        concurrency: ConcurrencyLimit,
        loaded: Callable[[Block], None],
    ) -> None:
        """`concurrency` limits the loads under way. `loaded` is called for each block that became READY."""
        self.planned = trio.Event()  # set and replaced after each look at the queue
        self._cache = cache
        self._queue = queue
        self._sources = sources
        self._concurrency = concurrency
        self._in_order = ConcurrencyLimit(
            concurrency.limit_max, first=_IN_ORDER_FIRST, growth=_IN_ORDER_GROWTH, fixed=concurrency.fixed
        )
        self._loaded = loaded
        self._active = 0
        self.readers_waiting = 0  # blocked on a block
        self._wake = trio.Event()

    def notify(self) -> None:
        """The queue, or the memory that is free, may have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Load until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._wake = trio.Event()
                short = self._start_loads(nursery)
                poll = short and (self._cache.pool.lingering or self._cache.pool.refused)
                with trio.move_on_after(_MEMORY_POLL_S if poll else float("inf")):
                    await self._wake.wait()

    def _start_loads(self, nursery: trio.Nursery) -> bool:
        """Start as many fetches as connections and memory allow; True if memory is the limit."""
        limit = self._concurrency.limit
        prefetches = max(1, limit - limit // 4)
        while self._active < limit:
            block = self._queue.next(prefetch=self._active < prefetches, in_order=self._in_order.limit)
            self.planned.set()
            self.planned = trio.Event()
            if block is None:
                return False
            buffer = self._cache.lease(block.range.size, block)
            if buffer is None:
                return True
            block.state = State.FETCHING
            self._active += 1
            for owner in block.owners:
                owner.loading += 1
            nursery.start_soon(self._load, block, buffer)
        return False

    async def _load(self, block: Block, buffer: Buffer) -> None:
        loaded: Buffer | None = None
        began = trio.current_time()
        learns = self._in_order.start() if _is_read_in_order(block) else None
        try:
            loaded = await self._sources.load(block, buffer)
        except StepfsError as error:
            self._failed(block, error)
        finally:
            self._active -= 1
            for owner in block.owners:
                owner.loading -= 1
            if learns is not None:
                took_s = None if loaded is None else trio.current_time() - began
                self._in_order.note_loaded(readers_wait=self.readers_waiting > 0)
                self._in_order.end(learns, block.range.size, took_s)
            self.notify()
        if loaded is None:
            return
        self._concurrency.note_loaded(readers_wait=self.readers_waiting > 0)
        if block.state is not State.FETCHING:
            self._cache.pool.give(loaded)  # forgotten meanwhile
            return
        self._cache.ready(block, loaded)
        self._loaded(block)

    def _failed(self, block: Block, error: StepfsError) -> None:
        if block.state is State.FETCHING:
            if not block.pinned and not isinstance(error, StoreUnreachableError):
                _log.warning(
                    "%s", error, extra={"alike": (type(error), str(error))}
                )  # else a reader gets the error
            self._queue.failed(block)
            self._cache.fail(block, error)


def _is_read_in_order(block: Block) -> bool:
    """Whether it is one of several blocks of an open slice."""
    return block.pinned and len(block.owners[0].places) > 1
