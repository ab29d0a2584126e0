"""The producer: append batches, flush, resume from `position`. Exactly once across any crash (COMMIT.md).

Its tasks never raise: the first failure is kept, cancels the rest, and wakes all waiters; the caller's own `append` or
`flush` raises it. A process that ends without leaving the `with` block loses unflushed appends, as in a crash.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

import trio

from stepfs._internal import entropy
from stepfs._internal.background import BackgroundLoop, generation
from stepfs._internal.clock import Clock, SystemClock
from stepfs.errors import RefusedError, StepfsError, UsageError
from stepfs.format.arguments import check_integer, check_text
from stepfs.format.identity import LakeIdentity, check_id
from stepfs.format.keys import data_key
from stepfs.format.tgb import Descriptor, TgbImage, build
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs_producer.backoff import Backoff, Outage
from stepfs_producer.commit.backpressure import BackPressure
from stepfs_producer.commit.loop import START_GIVE_UP_S, CommitLoop, CommitStats, SnapshotWriter, Started, start
from stepfs_producer.commit.pace import Pacer, Pacing
from stepfs_producer.commit.rebase import Incarnation
from stepfs_producer.commit.uploads import (
    CommitWindow,
    Item,
    Payload,
    Ticket,
    check_kind,
    check_records,
    descriptor_of,
    freeze,
    pack_note,
    pack_position,
    refuse_misfit,
    unpack_position,
)

MAX_PENDING_BYTES: Final = 512 << 20
MAX_DELAY_S: Final = 5.0
UPLOADS: Final = 8
GIVE_UP_AFTER_S: Final = 600.0

_INLINE_BYTES_MAX: Final = 256 << 10  # checksumming this much takes less time than reaching a worker thread
_T = TypeVar("_T")
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """What `Producer` and `AsyncProducer` take as keywords; `UsageError` if a value makes no sense."""

    # Payload bytes held in memory until they are committed; also the largest batch.
    max_pending_bytes: int = MAX_PENDING_BYTES
    # Seconds a durable batch waits at most for its first commit attempt, unless more producers share the log than can
    # commit that often (logged once; see `AsyncProducer.pacing`).
    max_delay: float = MAX_DELAY_S
    # Steps that the lake may run ahead of its slowest consumer group: more than lie between two checkpoints. None: any.
    max_lead: int | None = None
    # Payload bytes that may be live in the lake: committed by anybody, and not reclaimed. None: any.
    max_live_bytes: int | None = None
    # Whether the bounds of the lead hold while no consumer group is registered. False: no bound then, and one warning.
    max_lead_without_groups: bool = True
    # Uploads under way at a time.
    uploads: int = UPLOADS
    # Seconds without an answer from the store until `StoreUnreachableError`.
    give_up_after: float = GIVE_UP_AFTER_S

    def __post_init__(self) -> None:
        for name in ("max_pending_bytes", "uploads", "max_lead", "max_live_bytes"):
            value = getattr(self, name)
            if value is not None and check_integer(value, name) < 1:
                raise UsageError(f"{name}={value}: use at least 1")
        for name in ("max_delay", "give_up_after"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)}: use seconds from 0 on")


class TgbWriter:
    """Builds and uploads TGBs of one incarnation, a bounded number at once."""

    def __init__(self, store: Store, identity: LakeIdentity, me: Incarnation, *, at_once: int) -> None:
        self._store = store
        self._identity = identity
        self._me = me
        self._limiter = trio.CapacityLimiter(at_once)

    async def write(self, item: Item, key: str) -> Descriptor:
        """Upload one TGB under a name of its own; durable on return. May be repeated with the same key."""
        async with self._limiter:
            image = await self._build(item)
            await self._store.put(key, image.parts, crc32c=image.crc32c)
        return descriptor_of(image, key, item.seq)

    def new_key(self, item: Item) -> str:
        """A fresh name, random in part: a forked or rewound process never overwrites another's (hazard 8)."""
        return data_key(self._identity.lake_id, self._me.producer_id, self._me.epoch, item.seq)

    async def _build(self, item: Item) -> TgbImage:
        work = partial(
            build,
            lake_id=self._identity.lake_id,
            producer_id=self._me.producer_id,
            epoch=self._me.epoch,
            seq=item.seq,
            payloads=item.payloads,
            records=item.records,
        )
        if item.payload_bytes <= _INLINE_BYTES_MAX:
            return work()
        return await trio.to_thread.run_sync(work)


@dataclass(frozen=True, slots=True)
class Running:
    """The parts of a producer that has been started."""

    started: Started
    pending: CommitWindow
    loop: CommitLoop
    snapshots: SnapshotWriter
    writer: TgbWriter
    lead: BackPressure
    pacer: Pacer


class Readings(ABC):
    """What a producer tells about itself, blocking or not."""

    @property
    @abstractmethod
    def running(self) -> Running:
        """The parts of the running producer. `UsageError` if it has not been started."""

    @property
    def position(self) -> object:
        """The position of the newest committed batch of this id, by any incarnation; None before the first."""
        return unpack_position(self.running.loop.state.position)

    @property
    def next_seq(self) -> int:
        """The seq of the next append: the number of earlier batches of this id."""
        return self.running.pending.next_seq

    @property
    def committed_seq(self) -> int:
        """Batches of this id below this seq are committed."""
        return self.running.loop.state.next_seq

    @property
    def lake(self) -> LakeIdentity:
        """The lake's identity: slices per batch, file extension."""
        return self.running.started.identity

    @property
    def epoch(self) -> int:
        """This incarnation's epoch."""
        return self.running.started.me.epoch

    @property
    def tally(self) -> CommitStats:
        """The attempts of this incarnation so far, and their results."""
        return self.running.loop.tally

    @property
    def pacing(self) -> Pacing:
        """The present interval of this producer's commits; `gives_way` if it is longer than `max_delay`."""
        return self.running.pacer.pacing


class AsyncProducer(Readings):
    """One incarnation of a producer id, as an async context manager (trio).

    lake: an existing lake. producer_id: 1 to 256 bytes of printable text; the identity that survives restarts,
    unique among live processes. endpoint_url: an S3-compatible server. max_pending_bytes to give_up_after: see
    `ProducerSettings`. store, clock, pacer: instead of the URL's, the machine's and
    `stepfs_producer.commit.pace`'s (simulations, benchmarks); a given pacer has its own `max_delay`.

    Entering starts the incarnation and fences all older ones; leaving flushes; leaving by an exception abandons
    uncommitted batches.
    """

    def __init__(
        self,
        lake: str,
        *,
        producer_id: str,
        endpoint_url: str | None = None,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        max_delay: float = MAX_DELAY_S,
        max_lead: int | None = None,
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
            max_live_bytes,
            max_lead_without_groups,
            uploads,
            give_up_after,
        )
        self._url = check_text(lake, "lake", "file:///directory")
        self._endpoint_url = endpoint_url
        self._given_store = store
        self._clock = clock or SystemClock()
        self._pacer = pacer or Pacer(delay_max_s=self._settings.max_delay, draw=entropy.uniform)
        self._append_order = trio.Lock()
        self._closing = False
        self._pid = os.getpid()
        self._stack = AsyncExitStack()
        self._running: Running | None = None
        self.held_s = 0.0
        """Seconds that appends have waited: for trainers (`max_lead`), or reclaim (`max_live_bytes`)."""
        self._who = f"producer {producer_id!r}"
        self._changed = trio.lowlevel.ParkingLot()
        self.outage = Outage()
        self._failure: StepfsError | None = None
        self._scopes: dict[trio.CancelScope, None] = {}  # in the order of their start: simulations replay it

    async def __aenter__(self) -> Self:
        if self._running is not None or self._closing:
            raise UsageError("a producer runs once; make a new one")
        self._pid = os.getpid()
        store = self._given_store or open_store(self._url, endpoint_url=self._endpoint_url)
        if self._given_store is None:
            self._stack.push_async_callback(store.aclose)
        try:
            patience_s = min(START_GIVE_UP_S, self._settings.give_up_after)
            backoff = Backoff(f"{self._who}: start", patience_s)
            started = await start(store, self.producer_id, clock=self._clock, pacer=self._pacer, backoff=backoff)
            self._nursery_manager = trio.open_nursery()
            self._nursery = await self._nursery_manager.__aenter__()
        except BaseException:
            await self._stack.aclose()
            raise
        self._begin(store, started)
        return self

    def _begin(self, store: Store, started: Started) -> None:
        settings, reader = self._settings, started.committer.reader
        pending = CommitWindow(started.state.next_seq, memory_bytes_max=settings.max_pending_bytes)
        snapshots = SnapshotWriter(store, started.identity, reader)
        lead = BackPressure(
            reader.control,
            steps_max=settings.max_lead,
            live_bytes_max=settings.max_live_bytes,
            without_groups=settings.max_lead_without_groups,
        )
        loop = CommitLoop(
            store,
            started,
            pending,
            pacer=self._pacer,
            backoff=self._backoff("commit"),
            snapshots=snapshots,
            changed=self._changed,
            is_held=lambda: lead.is_held,
        )
        writer = TgbWriter(store, started.identity, started.me, at_once=settings.uploads)
        self._running = Running(started, pending, loop, snapshots, writer, lead, self._pacer)
        self._nursery.start_soon(self._guarded, loop.run)
        self._nursery.start_soon(self._guarded, snapshots.run)

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

    async def append(
        self, batch: Sequence[Payload], *, position: object, records: Sequence[int] | None = None, note: object = None
    ) -> int:
        """Append one global step: one payload of bytes per slice. Returns its seq.

        `position`: where to resume after this batch, any msgpack value up to 64 KiB; committed with it. `records`: per
        slice, for statistics. `note`: about the step, any msgpack value up to 256 bytes (the version of the weights that made
        it); `lake[step].note` returns it without reading data. Waits only while too much is pending, never for a commit. If it
        is cancelled while it waits, nothing was appended. Raises `UsageError` for a bad batch; `FencedError`, `SealedError`,
        `StoreUnreachableError` and others once the producer has failed.
        """
        running = self._open()
        started, pending = running.started, running.pending
        identity = started.identity
        grid = identity.grid
        payloads = freeze(batch, grid=grid, bytes_max=self._settings.max_pending_bytes)
        if identity.check_payload and pending.next_seq == started.state.next_seq:
            check_kind(payloads, ext=identity.ext)  # once: the first batch of this incarnation
        counts = check_records(records, slices=grid.slices)
        packed, noted = pack_position(position), pack_note(note)
        async with self._append_order:  # before anything that waits, so seqs are in the order of the calls
            await self._wait_for_capacity(sum(map(len, payloads)))
            await trio.lowlevel.checkpoint_if_cancelled()
            item = self._open().pending.add(payloads, counts, packed, noted)
            self._nursery.start_soon(self._guarded, self._upload, item)
            return item.seq

    async def reserve(
        self, *, position: object, records: Sequence[int] | None = None, note: object = None, payload_bytes: int
    ) -> Ticket:
        """Append one global step that is uploaded elsewhere: `settle` it once it is. Its seq is that of the call.

        `payload_bytes`: about how many, for back-pressure. Waits as `append` does. A ticket that is never settled holds back
        all that is appended after it until this incarnation ends; `flush` does not wait for it.
        """
        counts = check_records(records, slices=self._open().started.identity.grid.slices)
        packed, noted = pack_position(position), pack_note(note)
        async with self._append_order:
            await self._wait_for_capacity(payload_bytes, in_memory=False)
            await trio.lowlevel.checkpoint_if_cancelled()
            return self._with_new_key(self._open().pending.reserve(payload_bytes, counts, packed, noted))

    def renew(self, ticket: Ticket) -> Ticket:
        """Another key for the same seq: for a second constructor, beside or in place of one that may be lost."""
        return self._with_new_key(self._open().pending.reserved(ticket))

    def settle(self, ticket: Ticket, descriptor: Descriptor) -> None:
        """The object is durable under the key of this ticket, or of another one of its seq. `UsageError` if the descriptor
        does not fit, or the ticket was settled or is of another incarnation: nothing is changed then.
        """
        item = self._open().pending.reserved(ticket)
        refuse_misfit(item, descriptor)
        self._made_durable(item, descriptor)

    async def flush(self) -> None:
        """Return when everything appended before the call is durable, committed and visible to readers: up to the first
        ticket that is not settled.
        """
        self._refuse_fork()
        pending = self.running.pending
        self._check_failure()
        target = pending.certain_seq
        while pending.first_seq < target:
            await self._wait_for_change()
        await trio.lowlevel.checkpoint()

    async def finish(self) -> None:
        """Flush, and wait for the snapshots under way: nothing is left to do."""
        await self.flush()
        await self.running.snapshots.settled()

    async def retire(self) -> None:
        """Flush, then commit the retirement: this id is finished, its uncommitted uploads are orphans. No more
        appends.
        """
        loop = self._open().loop
        self._closing = True
        await self.flush()
        loop.retiring = True
        self._changed.unpark_all()
        while not loop.retired:
            await self._wait_for_change()

    @property
    def running(self) -> Running:
        """Its parts. `UsageError` if it has not been started."""
        if self._running is None:
            raise UsageError("the producer has not been started; use it as `with Producer(…) as producer:`")
        return self._running

    def _open(self) -> Running:
        """Its parts, unless this is a fork of the producer, or it was not started, failed, or is closed."""
        self._refuse_fork()
        running = self.running
        self._check_failure()
        if self._closing:
            raise UsageError(f"{self._who} is closed; make a new one")
        return running

    def _check_failure(self) -> None:
        """Raise the failure that stopped this producer, as a new exception at each call."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args) from self._failure

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise RefusedError(
                f"{self._who} belongs to process {self._pid}; after a fork, make a Producer of its own, "
                "with an id of its own, in the child"
            )

    async def _wait_for_change(self) -> None:
        """Wait for a change; raises the failure that stopped the producer."""
        self._check_failure()  # it notifies once, and we may come late
        await self._changed.park()
        self._check_failure()

    async def _wait_for_capacity(self, payload_bytes: int, *, in_memory: bool = True) -> None:
        """Back-pressure: wait until the budgets, and the lead over the slowest group, admit an append of this size."""
        backoff, running = self._backoff("max_lead"), self.running
        lead, pending = running.lead, running.pending
        while True:
            self._check_failure()
            head = running.loop.head
            if not pending.admits(payload_bytes, in_memory=in_memory):
                await self._wait_for_change()
            elif lead.look_due(head, pending, payload_bytes):
                await backoff.run(lead.look)
            elif lead.exceeded(head, pending, payload_bytes):
                lead.note_held(head, pending)
                began_s = trio.current_time()
                with trio.move_on_after(lead.pause_s):
                    await self._wait_for_change()
                self.held_s += trio.current_time() - began_s
            else:
                lead.note_moving()
                return

    def _with_new_key(self, item: Item) -> Ticket:
        ticket = Ticket(item.seq, self.running.writer.new_key(item))
        item.keys.add(ticket.key)
        return ticket

    async def _upload(self, item: Item) -> None:
        backoff = self._backoff(f"upload of seq {item.seq}")
        key = self.running.writer.new_key(item)
        self._made_durable(item, await backoff.run(lambda: self.running.writer.write(item, key)))

    def _made_durable(self, item: Item, tgb: Descriptor) -> None:
        self.running.pending.made_durable(item, tgb, trio.current_time())
        self._changed.unpark_all()

    def _backoff(self, what: str) -> Backoff:
        return Backoff(f"{self._who}: {what}", self._settings.give_up_after, self.outage)

    async def _guarded(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run a background task; its failure becomes the producer's."""
        scope = trio.CancelScope()
        self._scopes[scope] = None
        try:
            with scope:
                await work(*arguments)
        except StepfsError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a bug must surface in the caller, not hang its flush
            failure = StepfsError(f"{self._who} broke: {type(error).__name__}: {error}; report this")
            failure.__cause__ = error
            self._fail(failure)
        finally:
            del self._scopes[scope]

    def _fail(self, failure: StepfsError) -> None:
        self._failure = self._failure or failure
        self._changed.unpark_all()
        for scope in self._scopes:  # not the nursery's: that one holds the caller's own body too
            scope.cancel()


def _takes_what(
    model: Callable[Concatenate[Any, _P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Producer, _P], None]]:
    """The decorated `__init__` has the parameters of `model`, for type checkers and for help()."""

    def adopt(init: Callable[..., None]) -> Callable[Concatenate[Producer, _P], None]:
        init.__signature__ = inspect.signature(model)  # type: ignore[attr-defined]
        return init

    return adopt


class Producer(Readings):
    """`AsyncProducer` with blocking calls; arguments, results and errors are the same.

    May be used from several threads of one process; appends get their seqs in the order in which the thread takes
    them.
    """

    @_takes_what(AsyncProducer.__init__)
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._made = AsyncProducer(*arguments, **settings)
        self._made_by = os.getpid(), generation()
        self._loop: BackgroundLoop[AsyncProducer] | None = None

    def __enter__(self) -> Self:
        producer_id = self._async.producer_id
        if self._loop is not None:
            raise UsageError("a producer runs once; make a new one")
        self._loop = BackgroundLoop(
            lambda: self._async,
            name=f"stepfs-producer-{producer_id}",
            closed=f"producer {producer_id!r} is closed; make a new one",
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, traceback
        assert self._loop is not None
        try:
            if error is None:
                self._call(self._async.finish)
        finally:
            self._loop.stop()

    def append(
        self, batch: Sequence[Payload], *, position: object, records: Sequence[int] | None = None, note: object = None
    ) -> int:
        """Append one global step; see `AsyncProducer.append`. Blocks only while too much is pending.

        Ctrl-C ends the wait. `next_seq` then tells whether the batch was appended nevertheless, at the last moment.
        """
        return self._call(partial(self._async.append, batch, position=position, records=records, note=note))

    def flush(self) -> None:
        """Return when everything appended before the call is durable, committed and visible to readers."""
        self._call(self._async.flush)

    def retire(self) -> None:
        """Flush, then commit the retirement; see `AsyncProducer.retire`."""
        self._call(self._async.retire)

    def _call(self, work: Callable[[], Awaitable[_T]]) -> _T:
        if self._loop is None:
            raise UsageError("the producer has not been started; use it as `with Producer(…) as producer:`")
        return self._loop.call(work)

    @property
    def _async(self) -> AsyncProducer:
        """The producer, unless this is a child of a fork."""
        pid, made_in = self._made_by
        if made_in != generation():
            raise RefusedError(
                f"producer {self._made.producer_id!r} belongs to process {pid}; after a fork, make a Producer of its own, "
                "with an id of its own, in the child"
            )
        return self._made

    @property
    def running(self) -> Running:
        """See `AsyncProducer.running`."""
        return self._async.running
