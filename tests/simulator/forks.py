"""A fork of the simulated lake: a child that lives on the parent's data, reads it, reclaims, and in the end lets go."""

from __future__ import annotations

import trio
from cluster_world import World
from crc32c import crc32c
from doubles.faulty_store import ObjectMap
from lakework import reclaim
from ledger import payload
from process_store import ProcessStore
from scenario import ForkPlan

from stepfs.errors import RefusedError, StoreUnreachableError, UsageError, WithdrawnError
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.keys import control_prefix
from stepfs.format.snapshot import StepEntry
from stepfs.lake.control import Control, Group
from stepfs.lake.fork import Cut, fork, group_name
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores

_GROUP = "trainer"
_LOSES_CONTROL = 0.5  # chance that the newest control record of a new fork is lost


class ForkActor:
    """Forks once, whoever dies on the way, then trains on what it shares with the parent until nothing is left of it."""

    def __init__(self, world: World, plan: ForkPlan) -> None:
        self.world, self.plan, self.name = world, plan, plan.name
        self.rng = world.rng(plan.name)
        self.child: ObjectMap = ObjectMap()
        self.identity: LakeIdentity | None = None
        self.next_step = 0  # of the child's trainer
        self.begins = 0  # the child's first step
        self.groups: set[str] = set()  # held in the parent by forks that came to be

    async def main(self, store: ProcessStore) -> bool:
        ledger = self.world.ledger
        child = store.beside(self.child)
        try:
            if self.identity is None:
                parent = await LogReader.open(store, ledger.identity, until_damage=self.plan.until_damage)
                if not await self._fork(parent, child):
                    return False
            origins = OriginStores(child, lambda _: store)
            await self._train(child, store, origins)
        except StoreUnreachableError:
            return False
        return True

    async def _fork(self, parent: LogReader, child: ProcessStore) -> bool:
        """Make the child. A process killed in between leaves half a fork; the next one takes another URL."""
        ledger = self.world.ledger
        self.child = child.shared = ObjectMap()
        live = range(parent.first_live_step, parent.state.next_step + 1)
        if not live:  # a LIST that lags: what was read ends before what the floor calls live
            ledger.counts["forks of a stale view"] += 1
            return False
        step = Step(self.rng.choice(live))
        skip_end = Step(step + self.rng.choice((0, 0, 1, 5)))
        try:
            identity = await self._forked(parent, child, Cut(step, step, skip_end))
        except (UsageError, WithdrawnError):
            ledger.counts["forks overtaken"] += 1  # by a reclaim
            return False
        if identity is None:
            return False
        if self.rng.random() < _LOSES_CONTROL:
            prefix = control_prefix(identity.lake_id)
            self.child.remove(max(entry.key for entry in self.child.select(prefix)))
        name = group_name(identity.lake_id)
        record = await Group(Control(parent.store, ledger.identity, self.world.clock), name).read()
        self.identity, self.next_step, self.begins = identity, step, parent.first_live_step
        if record is not None:  # it shares steps
            ledger.promise(name, record.need)
            self.groups.add(name)
            self.next_step = record.need
        ledger.counts["forks"] += 1
        return True

    async def _forked(self, parent: LogReader, child: ProcessStore, cut: Cut) -> LakeIdentity | None:
        ledger = self.world.ledger
        try:
            return await fork(parent, child, cut, self.world.clock)
        except RefusedError as error:
            if parent.damage is not None and "its log was reclaimed meanwhile" in str(error):
                ledger.counts["forks overtaken"] += 1  # the damage is mended, and what came before it is gone
                return None
            ledger.require("the store erred; try again" in str(error), f"{self.name}: {error}")
            ledger.counts["forks refused by a false 412"] += 1
            return None

    async def _train(self, child: ProcessStore, parent: ProcessStore, origins: OriginStores) -> None:
        assert self.identity is not None
        reader = await LogReader.open(child, self.identity)
        (origin,) = reader.state.origins
        self.world.ledger.require(
            reader.first_live_step >= self.begins, f"{self.name} begins at {reader.first_live_step}, not {self.begins}"
        )
        name = group_name(self.identity.lake_id)
        if self.plan.again:
            await self._fork_again(reader, child, parent)
        while self.next_step < origin.end:
            step = Step(self.next_step)
            await self._read(parent, await reader.entry(step), origin.parent_step(step))
            self.next_step = step + 1
            await trio.sleep(self.plan.step_s)
            if self.next_step % self.plan.every == 0 or self.next_step >= origin.end:
                needed = Step(self.next_step)
                await Group.of(child, self.identity, _GROUP, self.world.clock).add(needed, keep=1)
                if needed >= origin.end:
                    self.world.ledger.release(name)
                else:
                    self.world.ledger.promises[name] = origin.parent_step(needed)
                await reclaim(child, self.identity, origins=origins, clock=self.world.clock)

    async def _fork_again(self, reader: LogReader, child: ProcessStore, parent: ProcessStore) -> None:
        """A fork of the fork reads the same steps, from the same lake."""
        live = range(reader.first_live_step, reader.state.next_step)
        if not live:
            return
        grandchild = child.beside(ObjectMap())
        end = Step(live.stop)
        identity = await self._forked(reader, grandchild, Cut(end, end, end))
        if identity is None:
            return
        log = await LogReader.open(grandchild, identity)
        nearest, origin = log.state.origins
        step = Step(self.rng.choice(live))
        entry = await log.entry(step)
        self.world.ledger.require(
            nearest.lake_id == reader.identity.lake_id and entry.tgb.origin == 2,
            f"{self.name}: a fork of the fork has {entry}",
        )
        await self._read(parent, entry, origin.parent_step(step))
        await Group(Control(child, reader.identity, self.world.clock), group_name(identity.lake_id)).retire()
        self.world.ledger.counts["forks of forks"] += 1

    async def _read(self, parent: ProcessStore, entry: StepEntry, number: int) -> None:
        """A step of the child is the parent's, and its bytes are still there."""
        ledger = self.world.ledger
        truth = ledger.steps[number]
        ledger.require(
            (entry.producer_id, entry.tgb.key) == (truth.producer_id, truth.tgb.key) and entry.tgb.origin > 0,
            f"{self.name} has {entry} where its parent had {truth}",
        )
        ref = entry.tgb.slice(SliceIndex(0))
        buffer = bytearray(ref.length)
        size = await parent.read_into(entry.tgb.key, ref.offset, memoryview(buffer))
        sound = size == ref.length and crc32c(bytes(buffer)) == ref.crc32c
        ledger.require(
            sound and bytes(buffer) == payload(entry.producer_id, entry.tgb.seq, 0),
            f"{self.name} cannot read step {number} of its parent: {size}",
        )
