"""The processes of a simulated cluster: each is the real code with the smallest caller that makes sense around it.

An actor's `main` runs one life and returns True when its work is done for good. Errors that an operator would expect
under the planted faults are let go; anything else is blamed on the code.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import trio
from cluster_world import World
from following import Following, read_step
from ledger import payload
from process_store import ProcessStore
from scenario import FollowerPlan, ProducerPlan

from stepfs.errors import FencedError, SealedError, StoreUnreachableError
from stepfs.follow.consumer_group import GroupFollower
from stepfs.format.ids import Step
from stepfs.lake.control import Control
from stepfs.lake.groups import Group
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer

_PATIENCE_S = 40.0


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
                max_lead=plan.max_lead,
            ) as producer:
                done = int(producer.position or 0)  # type: ignore[call-overload]
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
