"""The processes of a simulated cluster: each is the real code with the smallest caller that makes sense around it.

An actor's `main` runs one life and returns True when its work is done for good. Errors that an operator would expect
under the planted faults are let go; anything else is blamed on the code.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import trio
from following import Following, read_step
from ledger import Ledger, payload
from process_store import ProcessStore
from scenario import ProducerPlan, ReclaimerPlan, TrainerPlan

from stepfs.clock import TrioClock
from stepfs.consumers import Group
from stepfs.errors import FencedError, RefusedError, SealedError, StoreUnreachableError, WithdrawnError
from stepfs.format.ids import Step
from stepfs.format.records import ConsumerRecord
from stepfs.log.append import seal
from stepfs.log.reader import LogReader
from stepfs.reclaim.run import reclaim
from stepfs_producer import AsyncProducer

_PATIENCE_S = 40.0
_IDLE_RECLAIM_S_MAX = 60.0


@dataclass
class World:
    """What the actors share besides the store: the truth, the goal, and when it is time to stop."""

    ledger: Ledger
    seed: int
    total_steps: int
    over: trio.Event = field(default_factory=trio.Event)
    clock: TrioClock = field(default_factory=TrioClock)

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")


class ProducerActor:
    """Appends its records in order from wherever the log says it is, until all are in."""

    def __init__(self, world: World, plan: ProducerPlan) -> None:
        self.world, self.plan, self.name = world, plan, plan.name
        self.rng = world.rng(plan.name)

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
            ) as producer:
                done = producer.position or 0
                ledger.require(
                    done == producer.next_seq <= ledger.published.get(plan.name, 0),
                    f"{plan.name} resumes at {done} with seq {producer.next_seq}, {ledger.published} is published",
                )
                for number in range(done, plan.total):
                    batch = [payload(plan.name, number, i) for i in range(ledger.identity.slices)]
                    await producer.append(batch, position=number + 1)
                    if plan.gap_s:
                        await trio.sleep(self.rng.uniform(0, 2 * plan.gap_s))
                await producer.flush()
                ledger.require(
                    ledger.published.get(plan.name, 0) == plan.total,
                    f"{plan.name} flushed, but {ledger.published}",
                )
                if plan.retire:
                    await producer.retire()
                    # A successor may have started since, and lives: what counts is that the log says goodbye.
                    ledger.require(
                        (plan.name, producer.epoch + 1) in ledger.farewells, f"{plan.name} did not retire"
                    )
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


class TrainerActor:
    """A training run: consumes every step in order, checks every byte, keeps checkpoints, sometimes goes back.

    `acknowledged` is what survives a crash: the checkpoints whose registration was confirmed.
    """

    def __init__(self, world: World, plan: TrainerPlan) -> None:
        self.world, self.plan, self.name = world, plan, plan.name
        self.rng = world.rng(plan.name)
        self.acknowledged: set[int] = set()
        self.maybe: set[int] = set()  # checkpoints whose registration was begun and never confirmed
        self.order: tuple[int, ...] = ()  # in which the newest confirmed record has them
        self.newest = 0  # the newest checkpoint on the trainer's own disk
        self.start: int | None = None

    async def main(self, store: ProcessStore) -> bool:
        world, ledger = self.world, self.world.ledger
        try:
            reader = await LogReader.open(store, ledger.identity)
            group = Group.of(store, ledger.identity, self.plan.name, world.clock)
            if self.start is None:
                self.start = self.newest = (await group.register()).need
                ledger.promise(self.name, self.start)
            step = max(self.acknowledged, default=self.newest)
            if self.acknowledged and max(self.maybe, default=0) > step:
                step = await self._resume(
                    group, step
                )  # finish what the former life began, or --keep counts it
            follow = Following(self.name, ledger)
            while step < world.total_steps:
                await follow.until(reader, step)
                await read_step(self.name, ledger, store, reader, Step(step))
                step += 1
                await trio.sleep(self.plan.step_s)
                if step % self.plan.every == 0 or step == world.total_steps:
                    await self._checkpoint(group, step)
                    step = await self._go_back(group, step)
        except StoreUnreachableError:
            return False
        return True

    async def _checkpoint(self, group: Group, step: int) -> None:
        """Register; what `keep` drops loses its protection when the call begins, what is added has it at the end."""
        self.newest = step
        sure = [kept for kept in self.order if kept in self.acknowledged]
        order = [
            kept for kept in (*sure, *sorted(self.maybe)) if kept < step
        ]  # what is unsure may be the newest
        self.acknowledged -= set(order[: max(0, len(order) - (self.plan.keep - 1))])
        self.maybe.add(step)
        self.world.ledger.promises[self.name] = min(self.acknowledged, default=step)
        record = await group.add(Step(step), keep=self.plan.keep)
        self._confirmed(step, record)

    def _confirmed(self, step: int, record: ConsumerRecord) -> None:
        self.world.ledger.require(
            {step, *self.acknowledged} <= set(record.kept),
            f"{self.name}: {step}, {self.acknowledged} not in {record}",
        )
        self.acknowledged.add(step)
        self.order = record.order
        self.maybe = set(record.kept) - self.acknowledged
        self.world.ledger.promise(self.name, min(self.acknowledged))

    async def _go_back(self, group: Group, step: int) -> int:
        """Resume from a kept checkpoint; or bring back one that was dropped, which may come too late."""
        if self.rng.random() < self.plan.rollback:
            step = await self._resume(group, self.rng.choice(sorted(self.acknowledged)))
        if self.rng.random() < self.plan.behind:
            just_dropped = min(self.acknowledged) - self.rng.randint(1, 2 * self.plan.every)
            earlier = self.rng.choice((self.rng.randint(0, step), max(0, just_dropped)))
            self.maybe.add(earlier)
            try:
                record = await group.add(Step(earlier))
            except WithdrawnError:
                self.world.ledger.counts["withdrawn"] += 1
            else:
                self._confirmed(earlier, record)
                step = await self._resume(group, earlier)
        return step

    async def _resume(self, group: Group, step: int) -> int:
        """From an acknowledged checkpoint; the newer ones are of a branch that is given up."""
        self.newest = step
        self.maybe |= self.acknowledged
        self.acknowledged = {kept for kept in self.acknowledged if kept <= step}
        self._confirmed(step, await group.replace(frozenset(map(Step, self.acknowledged))))
        return step


class WatcherActor:
    """A mount without a group: follows, reads what is live, and must cope with steps going under it."""

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
                live = range(reader.first_live_step, reader.state.next_step)
                if live:
                    step = Step(self.rng.choice(live))
                    if ledger.first_live_step <= step:
                        await read_step(self.name, ledger, store, reader, step, may_go=True)
        except StoreUnreachableError:
            return False
        return True


class ReclaimerActor:
    """`stepfs reclaim --every`."""

    def __init__(self, world: World, plan: ReclaimerPlan) -> None:
        self.world, self.plan, self.name = world, plan, plan.name

    async def main(self, store: ProcessStore) -> bool:
        ledger = self.world.ledger
        every_s = self.plan.every_s
        while not self.world.over.is_set():
            try:
                report = await reclaim(store, ledger.identity, clock=self.world.clock)
                every_s = (
                    self.plan.every_s if report.deleted_objects else min(2 * every_s, _IDLE_RECLAIM_S_MAX)
                )
            except StoreUnreachableError:
                ledger.counts["reclaims cut short"] += 1
            except RefusedError as error:
                ledger.counts["reclaims refused"] += 1
                ledger.require(
                    "--retire" in str(error) or "other reclaimers" in str(error), f"{self.name}: {error}"
                )
            with trio.move_on_after(every_s):
                await self.world.over.wait()
        return True


class SealerActor:
    """Seals the lake once every producer is done."""

    def __init__(self, world: World) -> None:
        self.world, self.name = world, "sealer"

    async def main(self, store: ProcessStore) -> bool:
        ledger = self.world.ledger
        while len(ledger.steps) < self.world.total_steps:  # noqa: ASYNC110 - an operator looking now and then
            await trio.sleep(1.0)
        try:
            await seal(await LogReader.open(store, ledger.identity), self.world.clock)
            ledger.require(ledger.state.sealed, "seal() returned, but the log is not sealed")
            async with AsyncProducer(
                "memory://lake", producer_id="late", store=store, clock=self.world.clock
            ):
                ledger.blame("a producer started on a sealed lake")
        except StoreUnreachableError:
            return False
        except SealedError:
            return True
        return False
