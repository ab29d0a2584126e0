"""The processes of a simulated cluster: each is the real code with the smallest caller that makes sense around it.

An actor's `main` runs one life and returns True when its work is done for good. Errors that an operator would expect
under the planted faults are let go; anything else is blamed on the code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import trio
from cluster_world import World
from following import Following, read_step
from ledger import payload
from process_store import ProcessStore
from scenario import FollowerPlan, ProducerPlan

from stepfs.errors import CorruptError, FencedError, SealedError, StepfsError, StoreUnreachableError
from stepfs.follow.parts import GroupFollower
from stepfs.format.ids import Epoch, Step
from stepfs.format.tgb import TgbImage, build
from stepfs.lake.control import Control, Group
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer
from stepfs_producer.commit.uploads import Ticket, descriptor_of

_PATIENCE_S = 40.0
_FORKS = 0.3


class ProducerActor:
    """Appends its records in order from wherever the log says it is, until all are in."""

    def __init__(self, world: World, plan: ProducerPlan) -> None:
        self.world, self.plan, self.name = world, plan, plan.name
        self.rng = world.rng(plan.name)
        self._given_up = False  # a ticket, by this life

    async def main(self, store: ProcessStore) -> bool:
        ledger, plan = self.world.ledger, self.plan
        try:
            async with AsyncProducer(
                "memory://lake",
                producer_id=plan.name,
                store=store,
                clock=self.world.clock,
                max_delay=plan.max_delay_s,
                give_up_after=_PATIENCE_S,
                max_lead=plan.max_lead,
            ) as producer:
                done = int(producer.position or 0)  # type: ignore[call-overload]
                ledger.require(
                    ledger.is_former_life or done == producer.next_seq <= ledger.published.get(plan.name, 0),
                    f"{plan.name} resumes at {done} with seq {producer.next_seq}, {ledger.published} is published",
                )
                if plan.constructors:
                    await self._by_ticket(producer, store, done)
                else:
                    await self._append(producer, done)
                await producer.flush()
                ledger.require(
                    ledger.is_former_life or ledger.published.get(plan.name, 0) == plan.total,
                    f"{plan.name} flushed, but {ledger.published}",
                )
                if plan.retire:
                    await producer.retire()
                    # A successor may have started since, and lives: what counts is that the log says goodbye.
                    said = (plan.name, producer.epoch + 1) in ledger.farewells
                    ledger.require(said or ledger.is_former_life, f"{plan.name} did not retire")
        except StoreUnreachableError:
            return False
        except FencedError:
            ledger.counts["fenced"] += 1
            return False
        except SealedError:
            # The sealer waits for the last record; who was killed before hearing of it finds the lake closed.
            ledger.require(ledger.state.sealed, f"{plan.name}: sealed?")
            ledger.require(ledger.published.get(plan.name, 0) == plan.total, f"{plan.name} was sealed out")
        return True

    async def _append(self, producer: AsyncProducer, done: int) -> None:
        for number in range(done, self.plan.total):
            await producer.append(self._batch(number), position=number + 1)
            await self._pause()

    async def _by_ticket(self, producer: AsyncProducer, store: ProcessStore, done: int) -> None:
        """Some constructors upload side by side; a lost one has a successor, and may be heard of by the store alone. A ticket
        that is given up ends this life at once: with a bound on the lead nothing behind it may ever be admitted.
        """
        room = trio.Semaphore(self.plan.constructors)
        self._given_up = False
        async with trio.open_nursery() as nursery:
            for number in range(done, self.plan.total):
                await room.acquire()
                try:
                    ticket = await producer.reserve(position=number + 1, payload_bytes=100)
                except CorruptError:
                    raise  # of a look at the groups, which no `flush` repeats: this life ends, as that of an append
                except StepfsError as error:
                    # `flush` raises it, too, unless it is of a look at the groups and nothing is pending.
                    self._given_up |= isinstance(error, StoreUnreachableError)
                    break
                nursery.start_soon(self._construct, producer, store, ticket, number, room, nursery.cancel_scope.cancel)
                await self._pause()
        if self._given_up:
            raise StoreUnreachableError("a ticket is not settled, and holds back all behind it")

    async def _construct(
        self,
        producer: AsyncProducer,
        store: ProcessStore,
        ticket: Ticket,
        number: int,
        room: trio.Semaphore,
        end_life: Callable[[], None],
    ) -> None:
        until_s = trio.current_time() + _PATIENCE_S
        with suppress(StepfsError):  # of the producer: `flush` raises it, too
            while True:
                image = self._image(producer, ticket, number)
                if self.rng.random() >= self.plan.lost:
                    try:
                        await store.put(ticket.key, image.parts, crc32c=image.crc32c)
                    except StoreUnreachableError:
                        if trio.current_time() > until_s:
                            self.world.ledger.counts["tickets given up"] += 1
                            self._given_up = True
                            end_life()
                            break
                    else:
                        if self.rng.random() >= self.plan.lost:
                            producer.settle(ticket, descriptor_of(image, ticket.key, ticket.seq))
                            self.world.ledger.counts["settled"] += 1
                            break
                self.world.ledger.counts["lost constructors"] += 1
                await trio.sleep(self.rng.uniform(0, 1))
                ticket = producer.renew(ticket)
        room.release()

    def _image(self, producer: AsyncProducer, ticket: Ticket, number: int) -> TgbImage:
        batch = self._batch(number)
        return build(
            lake_id=producer.lake.lake_id, producer_id=producer.producer_id, epoch=Epoch(producer.epoch),
            seq=ticket.seq, payloads=batch, records=[1] * len(batch),
        )  # fmt: skip

    def _batch(self, number: int) -> list[bytes]:
        return [payload(self.plan.name, number, i) for i in range(self.world.ledger.identity.slices)]

    async def _pause(self) -> None:
        if self.plan.gap_s:
            await trio.sleep(self.rng.uniform(0, 2 * self.plan.gap_s))


class WatcherActor:
    """A mount without a group: follows, reads what is live, and must cope with steps going under it. Now and then it goes on
    as a DataLoader's worker does, from the state of the process before.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.rng = world.rng(name)

    async def main(self, store: ProcessStore) -> bool:
        ledger = self.world.ledger
        try:
            reader = await LogReader.open(store, ledger.identity)
            follow = Following(self.name, ledger)
            while reader.state.next_step < self.world.total_steps:
                await follow.until(reader, reader.state.next_step)
                reader.segments.limit(0)
                if self.rng.random() < _FORKS:
                    reader = await LogReader.continued(store, ledger.identity, reader.state)
                live = range(reader.first_live_step, reader.state.next_step)
                if live:
                    step = Step(self.rng.choice(live))
                    if ledger.first_live_step <= step:
                        await read_step(self.name, ledger, store, reader, step, may_go=True)
        except StoreUnreachableError:
            return False
        return True


class FollowerActor:
    """A mount with a group: it shows what some control record said of the group, and never goes back to an older one."""

    def __init__(self, world: World, plan: FollowerPlan) -> None:
        self.world, self.plan, self.name = world, plan, plan.name

    async def main(self, store: ProcessStore) -> bool:
        ledger, group = self.world.ledger, self.plan.group
        control = Control(store, ledger.identity, self.world.clock)
        tree = _Shown(Step(0))
        follower = GroupFollower(Group.on(control, group), tree, lambda: None, checkpoints=None)  # type: ignore[arg-type]
        seen = -1
        while not self.world.over.is_set():
            with suppress(StoreUnreachableError):
                await follower.look()
                ledger.require(control.number >= seen, f"{self.name} goes back to an older control record")
                seen, record = control.number, control.groups.get(group)
                if record is not None:
                    ledger.check_record(self.name, group, record)
                    ledger.require(tree.need == record.need, f"{self.name} shows {tree} for {record}")
            with trio.move_on_after(1.0):
                await self.world.over.wait()
        ledger.counts["followed"] += 1
        return True


@dataclass
class _Shown:
    need: Step
