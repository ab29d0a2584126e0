"""Loads queued blocks into memory, as many at a time as the store is worth (`concurrency`) and the budget allows.

Demand keeps a quarter of the connections for itself, so that a reader never waits behind a prefetch. How many blocks of one
open slice are under way is learned apart, from these loads alone: few, so that they come in order, until more turn out
to deliver more (a store far away).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from stepfs.data.blocks import Block, State
from stepfs.data.buffers import Buffer
from stepfs.data.cache.memory import Cache
from stepfs.data.fetch.concurrency import ConcurrencyLimit
from stepfs.data.queue import FetchQueue
from stepfs.data.sources import Sources
from stepfs.errors import CorruptError, StepfsError, StoreUnreachableError

_log = logging.getLogger("stepfs.data")
_IN_ORDER_FIRST: Final = 4
_IN_ORDER_GROWTH: Final = 1.5  # so GETs on a full link take no longer than a second one waits (`fetch.hedge`)
_MEMORY_POLL_S: Final = 0.05  # memory still seen by a reader or an abandoned thread returns without a signal


@dataclass(eq=False)
class BlockLoader:
    """The loads of one mount."""

    cache: Cache
    queue: FetchQueue
    sources: Sources
    concurrency: ConcurrencyLimit  # of the loads under way
    loaded: Callable[[Block], None]  # called for each block that became READY
    readers_waiting: int = 0  # blocked on a block

    def __post_init__(self) -> None:
        self.planned = trio.Event()  # set and replaced after each look at the queue
        self._in_order = ConcurrencyLimit(
            self.concurrency.limit_max,
            first=_IN_ORDER_FIRST,
            growth=_IN_ORDER_GROWTH,
            fixed=self.concurrency.fixed,
        )
        self._active = 0
        self._wake = trio.Event()

    def notify(self) -> None:
        """The queue, or the memory that is free, may have changed."""
        self._wake.set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                self._wake = trio.Event()
                short = self._start_loads(nursery)
                poll = short and (self.cache.pool.lingering or self.cache.pool.refused)
                with trio.move_on_after(_MEMORY_POLL_S if poll else float("inf")):
                    await self._wake.wait()

    def _start_loads(self, nursery: trio.Nursery) -> bool:
        """Start as many fetches as connections and memory allow; True if memory is the limit."""
        limit = self.concurrency.limit
        prefetches = max(1, limit - limit // 4)
        while self._active < limit:
            block = self.queue.next(prefetch=self._active < prefetches, in_order=self._in_order.limit)
            self.planned.set()
            self.planned = trio.Event()
            if block is None:
                return False
            buffer = self.cache.lease(block.range.size, block)
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
            loaded = await self.sources.load(block, buffer)
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
        self.concurrency.note_loaded(readers_wait=self.readers_waiting > 0)
        if block.state is not State.FETCHING:
            self.cache.pool.give(loaded)  # forgotten meanwhile
            return
        self.cache.ready(block, loaded)
        self.loaded(block)

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


def _is_read_in_order(block: Block) -> bool:
    """Whether it is one of several blocks of an open slice."""
    return block.pinned and len(block.owners[0].places) > 1
