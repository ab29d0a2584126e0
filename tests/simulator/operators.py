"""Who keeps a simulated lake in order: reclaimers that run all the time, and the one who seals it."""

from __future__ import annotations

import trio
from cluster_world import World
from process_store import ProcessStore
from scenario import ReclaimerPlan

from stepfs.errors import RefusedError, SealedError, StoreUnreachableError
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim.run import Reclaimer
from stepfs_producer import AsyncProducer

_IDLE_RECLAIM_S_MAX = 60.0


class ReclaimerActor:
    """`stepfs reclaim --every`, or as a timer runs it."""

    def __init__(self, world: World, plan: ReclaimerPlan) -> None:
        self.world, self.plan, self.name = world, plan, plan.name

    async def main(self, store: ProcessStore) -> bool:
        ledger = self.world.ledger
        every_s = self.plan.every_s
        reclaimer: Reclaimer | None = None
        while not self.world.over.is_set():
            try:
                if reclaimer is None or self.plan.timer:
                    reclaimer = Reclaimer(store, ledger.identity, clock=self.world.clock, grace_s=self.plan.grace_s)
                report = await reclaimer.run()
                every_s = self.plan.every_s if report.deleted_objects else min(2 * every_s, _IDLE_RECLAIM_S_MAX)
            except StoreUnreachableError:
                ledger.counts["reclaims cut short"] += 1
            except RefusedError as error:
                ledger.counts["reclaims refused"] += 1
                ledger.require("were faster every time" in str(error) or self.world.lying, f"{self.name}: {error}")
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
            async with AsyncProducer("memory://lake", producer_id="late", store=store, clock=self.world.clock):
                ledger.blame("a producer started on a sealed lake")
        except StoreUnreachableError:
            return False
        except SealedError:
            return True
        return False
