"""The producer: append batches, flush, resume from `position`. Exactly once across any crash (COMMIT.md)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import trio

from stepfs import entropy
from stepfs.clock import Clock, SystemClock
from stepfs.errors import RefusedError, UsageError
from stepfs.format.arguments import check_text
from stepfs.format.records import LakeIdentity, check_id
from stepfs.format.tgb import Descriptor
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs_producer.backoff import Backoff
from stepfs_producer.commit_loop import CommitStats
from stepfs_producer.pace import Pacer, Pacing
from stepfs_producer.pending import Ticket
from stepfs_producer.recovery import START_GIVE_UP_S, start
from stepfs_producer.running import RunningProducer
from stepfs_producer.settings import (
    GIVE_UP_AFTER_S,
    MAX_DELAY_S,
    MAX_PENDING_BYTES,
    UPLOADS,
    ProducerSettings,
)
from stepfs_producer.tgb_writer import (
    Payload,
    check_kind,
    check_records,
    freeze,
    pack_position,
    unpack_position,
)


class AsyncProducer:
    """One incarnation of a producer id, as an async context manager (trio).

    lake_url: an existing lake. producer_id: 1 to 256 bytes of printable text; the identity that survives restarts,
    unique among live processes. endpoint_url: an S3-compatible server. max_pending_bytes to give_up_after: see
    `stepfs_producer.settings.ProducerSettings`. store, clock, pacer: instead of the URL's, the machine's and
    `stepfs_producer.pace`'s (simulations, benchmarks); a given pacer has its own `max_delay`.

    Entering starts the incarnation and fences all older ones; leaving flushes; leaving by an exception abandons
    uncommitted batches.
    """

    def __init__(
        self,
        lake_url: str,
        *,
        producer_id: str,
        endpoint_url: str | None = None,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        max_delay: float = MAX_DELAY_S,
        max_lead: int | None = None,
        max_lead_bytes: int | None = None,
        max_live_bytes: int | None = None,
        uploads: int = UPLOADS,
        give_up_after: float = GIVE_UP_AFTER_S,
        max_lead_without_groups: bool = True,
        store: Store | None = None,
        clock: Clock | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.producer_id = check_id(producer_id, "producer_id")
        self._settings = ProducerSettings(
            max_pending_bytes,
            max_delay,
            max_lead,
            max_lead_bytes,
            max_live_bytes,
            max_lead_without_groups,
            uploads,
            give_up_after,
        )
        self._url = check_text(lake_url, "lake_url", "file:///directory")
        self._endpoint_url = endpoint_url
        self._given_store = store
        self._clock = clock or SystemClock()
        self._pacer = pacer or Pacer(delay_max_s=self._settings.max_delay, draw=entropy.uniform)
        self._append_order = trio.Lock()
        self._closing = False
        self._pid = os.getpid()
        self._stack = AsyncExitStack()
        self._live: RunningProducer | None = None

    async def __aenter__(self) -> Self:
        if self._live is not None or self._closing:
            raise UsageError("a producer runs once; make a new one")
        self._pid = os.getpid()
        store = self._given_store or open_store(self._url, endpoint_url=self._endpoint_url)
        if self._given_store is None:
            self._stack.push_async_callback(store.aclose)
        try:
            patience_s = min(START_GIVE_UP_S, self._settings.give_up_after)
            backoff = Backoff(f"producer {self.producer_id!r}: start", patience_s)
            started = await start(store, self.producer_id, clock=self._clock, pacer=self._pacer, backoff=backoff)
            self._nursery_manager = trio.open_nursery()
            self._nursery = await self._nursery_manager.__aenter__()
        except BaseException:
            await self._stack.aclose()
            raise
        self._live = RunningProducer(store, started, self._pacer, self._settings, self._nursery)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, traceback
        try:
            if error is None:
                await self.finish()
        finally:
            self._closing = True
            self._nursery.cancel_scope.cancel()
            # The body's exception stays out of the nursery, which would wrap it into a group.
            try:
                await self._nursery_manager.__aexit__(None, None, None)
            finally:
                with trio.CancelScope(shield=True):
                    await self._stack.aclose()

    async def append(self, batch: Sequence[Payload], *, position: object, records: Sequence[int] | None = None) -> int:
        """Append one global step: one payload of bytes per slice. Returns its seq.

        `position`: where to resume after this batch, any msgpack value up to 64 KiB; committed with it. `records`: per
        slice, for statistics. Waits only while too much is pending, never for a commit. If it is cancelled while it
        waits, nothing was appended. Raises `UsageError` for a bad batch;
        `FencedError`, `SealedError`, `StoreUnreachableError` and others once the producer has failed.
        """
        live = self._open()
        grid = live.started.identity.grid
        payloads = freeze(batch, grid=grid, bytes_max=self._settings.max_pending_bytes)
        if live.started.identity.check_payload and live.pending.next_seq == live.started.state.next_seq:
            check_kind(payloads, ext=live.started.identity.ext)  # once: the first batch of this incarnation
        counts = check_records(records, slices=grid.slices)
        packed = pack_position(position)
        async with self._append_order:  # before anything that waits, so seqs are in the order of the calls
            await live.wait_for_capacity(sum(map(len, payloads)))
            await trio.lowlevel.checkpoint_if_cancelled()
            self._open()
            return live.start_upload(payloads, counts, packed).seq

    async def reserve(self, *, position: object, records: Sequence[int] | None = None, payload_bytes: int) -> Ticket:
        """Append one global step that is uploaded elsewhere: `settle` it once it is. Its seq is that of the call.

        `payload_bytes`: about how many, for back-pressure. Waits as `append` does. A ticket that is never settled holds back
        all that is appended after it until this incarnation ends; `flush` does not wait for it.
        """
        live = self._open()
        counts = check_records(records, slices=live.started.identity.grid.slices)
        packed = pack_position(position)
        async with self._append_order:
            await live.wait_for_capacity(payload_bytes, in_memory=False)
            await trio.lowlevel.checkpoint_if_cancelled()
            self._open()
            return live.reserve(payload_bytes, counts, packed)

    def renew(self, ticket: Ticket) -> Ticket:
        """Another key for the same seq: for a second constructor, beside or in place of one that may be lost."""
        return self._open().renew(ticket)

    def settle(self, ticket: Ticket, descriptor: Descriptor) -> None:
        """The object is durable under the key of this ticket, or of another one of its seq. `UsageError` if the descriptor
        does not fit, or the ticket was settled or is of another incarnation: nothing is changed then.
        """
        self._open().settle(ticket, descriptor)

    async def flush(self) -> None:
        """Return when everything appended before the call is durable, committed and visible to readers: up to the first
        ticket that is not settled."""
        self._refuse_fork()
        live = self._running
        live.check()
        target = live.pending.certain_seq
        while live.pending.first_seq < target:
            await live.wait_for_change()
        await trio.lowlevel.checkpoint()

    async def finish(self) -> None:
        """Flush, and wait for the snapshots under way: nothing is left to do."""
        await self.flush()
        await self._running.snapshots.settled()

    async def retire(self) -> None:
        """Flush, then commit the retirement: this id is finished, its uncommitted uploads are orphans. No more
        appends."""
        live = self._open()
        self._closing = True
        await self.flush()
        live.loop.retiring = True
        live.changed.unpark_all()
        while not live.loop.retired:
            await live.wait_for_change()

    @property
    def position(self) -> object:
        """The position of the newest committed batch of this id, by any incarnation; None before the first."""
        return unpack_position(self._running.loop.state.position)

    @property
    def next_seq(self) -> int:
        """The seq of the next append: the number of earlier batches of this id."""
        return self._running.pending.next_seq

    @property
    def committed_seq(self) -> int:
        """Batches of this id below this seq are committed."""
        return self._running.loop.state.next_seq

    @property
    def lake(self) -> LakeIdentity:
        """The lake's identity: slices per batch, file extension."""
        return self._running.started.identity

    @property
    def epoch(self) -> int:
        """This incarnation's epoch."""
        return self._running.started.me.epoch

    @property
    def tally(self) -> CommitStats:
        """The attempts of this incarnation so far, and their results."""
        return self._running.loop.tally

    @property
    def held_s(self) -> float:
        """Seconds that appends of this incarnation have waited: for trainers (`max_lead`), or reclaim (`max_live_bytes`)."""
        return self._running.held_s

    @property
    def pacing(self) -> Pacing:
        """The present interval of this producer's commits; `gives_way` if it is longer than `max_delay`."""
        return self._pacer.pacing

    @property
    def _running(self) -> RunningProducer:
        if self._live is None:
            raise UsageError("the producer has not been started; use it as `with Producer(…) as producer:`")
        return self._live

    def _open(self) -> RunningProducer:
        """The running producer, unless this is a fork of it, or it failed, or it is closed."""
        self._refuse_fork()
        live = self._running
        live.check()
        if self._closing:
            raise UsageError(f"producer {self.producer_id!r} is closed; make a new one")
        return live

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise RefusedError(
                f"producer {self.producer_id!r} belongs to process {self._pid}; after a fork, make a Producer of its own, "
                "with an id of its own, in the child"
            )
