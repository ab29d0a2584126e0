"""A lake in memory with a ledger watching it, and the source that a well-behaved user would write.

Record n of a producer has known bytes; its position is n + 1. So `published[id] == n` in the ledger says: records 0 to
n - 1, each once, in order, each durable before it was visible.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import trio
from deterministic import run_seeded
from doubles.faults import Plan, no_faults
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from ledger import Ledger, payload

from stepfs.errors import StepfsError
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake
from stepfs_producer import AsyncProducer

SLICES = 2
T = TypeVar("T")


@dataclass
class World:
    shared: ObjectMap
    identity: LakeIdentity
    ledger: Ledger

    @classmethod
    async def create(cls) -> World:
        shared = ObjectMap()
        identity = await create_lake(FaultyStore(shared, actor="init"), slices=SLICES, clock=TrioClock())
        return cls(shared, identity, Ledger(shared, identity, SEGMENT_STEPS))

    def store(self, actor: str, plan: Plan = no_faults, seed: int = 0) -> FaultyStore:
        return FaultyStore(self.shared, actor=actor, plan=plan, seed=seed)

    def producer(self, who: str, store: FaultyStore | None = None, **options: Any) -> AsyncProducer:
        return AsyncProducer("memory://", producer_id=who, store=store or self.store(who), clock=TrioClock(), **options)

    async def settle(self, seconds: float = 60.0) -> None:
        """Let everything land that is still on its way."""
        await trio.sleep(seconds)
        self.shared.settle(trio.current_time())

    def check(self, **published: int) -> None:
        assert not self.ledger.broken, self.ledger.broken
        assert self.ledger.published == {who: count for who, count in published.items() if count}


async def feed(producer: AsyncProducer, until: int, *, pause_s: float = 0.0) -> None:
    """Continue the source where the log says, up to record `until`."""
    start = producer.position
    for number in range(start if isinstance(start, int) else 0, until):
        await append(producer, number)
        if pause_s:
            await trio.sleep(pause_s)


async def append(producer: AsyncProducer, number: int) -> None:
    batch = [payload(producer.producer_id, number, index) for index in range(SLICES)]
    await producer.append(batch, position=number + 1)


def simulate(scenario: Callable[[World], Awaitable[T]], *, seed: int = 0) -> T:
    """Run a scenario on a fresh world, in virtual time, as a function of the seed."""

    async def main() -> T:
        return await scenario(await World.create())

    return run_seeded(main, seed=seed)


def caught() -> pytest.RaisesExc[BaseException]:
    """A mutant shows itself to the ledger, to the writer's own assertions, or to the rules of `apply`."""
    return pytest.raises((AssertionError, StepfsError, pytest.fail.Exception))


async def reclaim_below(world: World, step: int) -> None:
    store = world.store("reclaimer")
    world.ledger.promise("trainer", step)
    await Group.of(store, world.identity, "trainer").add(Step(step), keep=1)
    await reclaim(store, world.identity)
