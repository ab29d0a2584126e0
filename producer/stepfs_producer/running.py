"""A running incarnation: its tasks, and the one failure that stops them all.

Tasks in the caller's nursery: an upload per append (bounded by `TgbWriter`), the commit loop, the snapshot writer. They
never raise: the first failure is kept, cancels the rest, and wakes all waiters; the caller's own `append` or `flush`
raises it. `changed` is unparked at every change that a waiter may wait for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from stepfs.errors import StepfsError
from stepfs.format.tgb import Descriptor
from stepfs.store.api import Store
from stepfs_producer.backoff import Backoff, Outage
from stepfs_producer.commit_loop import CommitLoop
from stepfs_producer.lead.limit import Lead
from stepfs_producer.pace import Pacer
from stepfs_producer.pending import Item, Pending, Ticket, refuse_misfit
from stepfs_producer.recovery import Started
from stepfs_producer.settings import ProducerSettings
from stepfs_producer.snapshots import SnapshotWriter
from stepfs_producer.tgb_writer import TgbWriter


class RunningProducer:
    """The state of a producer between entering and leaving it."""

    def __init__(
        self, store: Store, started: Started, pacer: Pacer, settings: ProducerSettings, nursery: trio.Nursery
    ) -> None:
        self.started = started
        self.changed = trio.lowlevel.ParkingLot()
        self.pending = Pending(started.state.next_seq, memory_bytes_max=settings.max_pending_bytes)
        self.snapshots = SnapshotWriter(store, started.identity, started.committer.reader)
        self._who = f"producer {started.me.producer_id!r}"
        self._outage = Outage()
        self._settings = settings
        self._nursery = nursery
        self.held_s = 0.0  # that appends waited for trainers
        self._failure: StepfsError | None = None
        self._scopes: dict[trio.CancelScope, None] = {}  # in the order of their start: simulations replay it
        self.loop = CommitLoop(
            store,
            started,
            self.pending,
            pacer=pacer,
            backoff=self._backoff("commit"),
            snapshots=self.snapshots,
            changed=self.changed,
        )
        self._writer = TgbWriter(store, started.identity, started.me, at_once=settings.uploads)
        self._lead = Lead(
            started.committer.reader.control,
            steps_max=settings.max_lead,
            bytes_max=settings.max_lead_bytes,
            live_bytes_max=settings.max_live_bytes,
            without_groups=settings.max_lead_without_groups,
        )
        nursery.start_soon(self._guarded, self.loop.run)
        nursery.start_soon(self._guarded, self.snapshots.run)

    def check(self) -> None:
        """Raise the failure that stopped this producer, as a new exception at each call."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args) from self._failure

    async def wait_for_change(self) -> None:
        """Wait for a change; raises the failure that stopped the producer."""
        self.check()  # it notifies once, and we may come late
        await self.changed.park()
        self.check()

    async def wait_for_capacity(self, payload_bytes: int, *, in_memory: bool = True) -> None:
        """Back-pressure: wait until the budgets, and the lead over the slowest group, admit an append of this size."""
        backoff = self._backoff("max_lead")
        while True:
            self.check()
            head = self.loop.head
            if not self.pending.admits(payload_bytes, in_memory=in_memory):
                await self.wait_for_change()
            elif self._lead.look_due(head, self.pending, payload_bytes):
                await backoff.run(self._lead.look)
            elif self._lead.exceeded(head, self.pending, payload_bytes):
                self._lead.note_held(head)
                began_s = trio.current_time()
                with trio.move_on_after(self._lead.pause_s):
                    await self.wait_for_change()
                self.held_s += trio.current_time() - began_s
            else:
                self._lead.note_moving()
                return

    def start_upload(self, payloads: tuple[bytes, ...], records: tuple[int, ...], position: bytes) -> Item:
        """Give an append its seq and start its upload; never waits."""
        item = self.pending.add(payloads, records, position)
        self._nursery.start_soon(self._guarded, self._upload, item)
        return item

    def reserve(self, payload_bytes: int, records: tuple[int, ...], position: bytes) -> Ticket:
        """Give an append its seq that is uploaded elsewhere; never waits."""
        return self._with_new_key(self.pending.reserve(payload_bytes, records, position))

    def renew(self, ticket: Ticket) -> Ticket:
        """Another key for the same seq."""
        return self._with_new_key(self.pending.reserved(ticket))

    def settle(self, ticket: Ticket, tgb: Descriptor) -> None:
        item = self.pending.reserved(ticket)
        refuse_misfit(item, tgb)
        self._made_durable(item, tgb)

    def _with_new_key(self, item: Item) -> Ticket:
        ticket = Ticket(item.seq, self._writer.new_key(item))
        item.keys.add(ticket.key)
        return ticket

    async def _upload(self, item: Item) -> None:
        backoff = self._backoff(f"upload of seq {item.seq}")
        key = self._writer.new_key(item)
        self._made_durable(item, await backoff.run(lambda: self._writer.write(item, key)))

    def _made_durable(self, item: Item, tgb: Descriptor) -> None:
        self.pending.made_durable(item, tgb, trio.current_time())
        self.changed.unpark_all()

    def _backoff(self, what: str) -> Backoff:
        return Backoff(f"{self._who}: {what}", self._settings.give_up_after, self._outage)

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
        self.changed.unpark_all()
        for scope in self._scopes:  # not the nursery's: that one holds the caller's own body too
            scope.cancel()
