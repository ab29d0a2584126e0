"""Training runs of a simulated cluster that say themselves which checkpoints they keep.

`TrainerActor` is one process. It says so through `stepfs.checkpoints.record`, the door of the hook and of the command
line, or, as a mount does that watches a directory, by naming the whole set.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Protocol

import trio
from cluster_world import World
from following import Following, read_step
from process_store import ProcessStore
from scenario import TrainerPlan

from stepfs.checkpoints.record import record_checkpoint
from stepfs.errors import AbsentError, StoreUnreachableError, WithdrawnError
from stepfs.format.control import GroupRecord
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.log.reader import LogReader

_DROPS: Final = 0.5
_RETURNS_MAX: Final = 100  # with a checkpoint a step, half of which go back, a run would never arrive


class Door(Protocol):
    """How a training run says which checkpoints are durable."""

    async def begin(self) -> None: ...

    async def add(self, step: int, *, keep: int | None = None) -> GroupRecord: ...

    async def go_back(self, step: int, kept: set[int], newer: set[int]) -> GroupRecord: ...


class WholeSet:
    """As a mount does that watches a checkpoint directory."""

    def __init__(self, world: World, name: str, store: ProcessStore) -> None:
        self._group = Group.of(store, world.ledger.identity, name, world.clock)

    async def begin(self) -> None:
        """Nothing that a former life has sent can land any more: a set that is on record already takes no slot."""
        await self._group.register()

    async def add(self, step: int, *, keep: int | None = None) -> GroupRecord:
        return await self._group.add(Step(step), keep=keep)

    async def go_back(self, step: int, kept: set[int], newer: set[int]) -> GroupRecord:
        del step, newer
        return await self._group.replace(frozenset(map(Step, kept)))


class OneByOne:
    """As the hook and the command line do, each call on a log that it opens itself."""

    def __init__(self, world: World, name: str, store: ProcessStore) -> None:
        self._identity, self._name, self._store = world.ledger.identity, name, store
        self._rng = world.rng(f"{name}/{store.url}")

    async def begin(self) -> None:
        """What it says first takes a slot in any case."""

    async def add(self, step: int, *, keep: int | None = None) -> GroupRecord:
        log = await LogReader.open(self._store, self._identity)
        return await record_checkpoint(log.control, log.state.next_step, self._name, step, keep=keep)

    async def go_back(self, step: int, kept: set[int], newer: set[int]) -> GroupRecord:
        """Say what is resumed from; what came after it is dropped, or left to be passed."""
        del kept
        log = await LogReader.open(self._store, self._identity)
        record = await record_checkpoint(log.control, log.state.next_step, self._name, step, resumed=True)
        for other in sorted(newer) if self._rng.random() < _DROPS else ():
            if other in record.kept:
                with suppress(AbsentError):  # an earlier life has dropped it, and its record lands only now
                    record = await record_checkpoint(log.control, log.state.next_step, self._name, other, drop=True)
        return record


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
        self.returns = 0
        self.era = 0

    async def main(self, store: ProcessStore) -> bool:
        world, ledger = self.world, self.world.ledger
        if self.era != ledger.era:
            self._forget()
        try:
            self.reader = reader = await LogReader.open(store, ledger.identity)
            group = (OneByOne if self.plan.one_by_one else WholeSet)(world, self.name, store)
            if self.start is None:
                joining = Group.of(store, ledger.identity, self.name, world.clock)
                self.start = self.newest = (await joining.register()).need
                ledger.promise(self.name, self.start)
            else:
                await group.begin()
            step = max(self.acknowledged, default=self.newest)
            if self.maybe:
                # Say which one it is: --keep would count what the former life may have recorded since; and where the store
                # took none of its checkpoints, producers that may not lead by more would wait for this run for ever.
                step = await self._resume(group, step)
            follow = Following(self.name, ledger)
            while step < world.total_steps and not ledger.is_former_life:  # the job begins again, too
                await follow.until(reader, step)
                await read_step(self.name, ledger, store, reader, Step(step))
                step += 1
                await trio.sleep(self.plan.step_s)
                if step % self.plan.every == 0 or step == world.total_steps:
                    await self._checkpoint(group, step)
                    step = await self._go_back(group, step)
                    if self.rng.random() < self.plan.retires:
                        step = max(step, await self._begin_again(store))
        except StoreUnreachableError:
            return False
        return True

    async def _begin_again(self, store: ProcessStore) -> int:
        """The run is ended, and another one begins under its name: it needs what is live, and has no checkpoints."""
        ledger = self.world.ledger
        group = Group.of(store, ledger.identity, self.name, self.world.clock)
        ledger.release(self.name)
        self._forget()
        with suppress(AbsentError):  # an earlier life has retired it, and its record lands only now
            await group.retire()
        record = await group.register()
        ledger.check_record(self.name, self.name, record)
        self.start = self.newest = record.need
        ledger.promise(self.name, self.start)
        ledger.counts["retired and begun again"] += 1
        return self.start

    def _forget(self) -> None:
        """Begin anew: with the group as it is on record."""
        self.acknowledged, self.maybe, self.order, self.start = set(), set(), (), None
        self.era = self.world.ledger.era

    async def _checkpoint(self, group: Door, step: int) -> None:
        """Register; what `keep` drops loses its protection when the call begins, what is added has it at the end."""
        await self.reader.check_history()  # as the hook does
        self.newest = step
        sure = [kept for kept in self.order if kept in self.acknowledged]
        # What is unsure may be the newest; what lies beyond this step does not count.
        order = [kept for kept in (*sure, *sorted(self.maybe)) if kept < step]
        self.acknowledged -= set(order[: max(0, len(order) - (self.plan.keep - 1))])
        self.maybe.add(step)
        least = min(self.acknowledged, default=step)
        with self.world.ledger.giving_up(self.name, least, lambda: min(self._on_record(step))):
            record = await group.add(step, keep=self.plan.keep)
        self._confirmed(step, record)

    def _on_record(self, step: int) -> set[int]:
        """What the group keeps when a process that has known the log that was lost adds `step` to it, as the older copy has it:
        that process is promised nothing, and what it keeps besides may be lost. What the copy keeps stays promised.
        """
        record = self.world.ledger.control.groups.get(self.name)
        order = [kept for kept in (() if record is None else record.order) if kept < step]
        return {step, *order[max(0, len(order) - (self.plan.keep - 1)) :]}

    def _confirmed(self, step: int, record: GroupRecord) -> None:
        if self.world.ledger.is_former_life:
            return
        self.world.ledger.require(
            {step, *self.acknowledged} <= set(record.kept), f"{self.name}: {step}, {self.acknowledged} not in {record}"
        )
        self.world.ledger.check_record(self.name, self.name, record)
        self.acknowledged.add(step)
        self.order = record.order
        self.maybe = set(map(int, record.kept)) - self.acknowledged
        self.world.ledger.promise(self.name, min(self.acknowledged))

    async def _go_back(self, group: Door, step: int) -> int:
        """Resume from a kept checkpoint; or bring back one that was dropped, which may come too late."""
        if self.returns >= _RETURNS_MAX or not self.acknowledged:
            return step
        if self.rng.random() < self.plan.rollback:
            step = await self._resume(group, self.rng.choice(sorted(self.acknowledged)))
        if self.rng.random() < self.plan.behind:
            just_dropped = min(self.acknowledged) - self.rng.randint(1, 2 * self.plan.every)
            earlier = self.rng.choice((self.rng.randint(0, step), max(0, just_dropped)))
            self.maybe.add(earlier)
            try:
                record = await group.add(earlier)
            except WithdrawnError:
                self.world.ledger.counts["withdrawn"] += 1
            else:
                self._confirmed(earlier, record)
                step = await self._resume(group, earlier)
        return step

    async def _resume(self, group: Door, step: int) -> int:
        """From a checkpoint on the trainer's disk; the newer ones are of a branch that is given up."""
        self.returns += 1
        self.newest = step
        self.maybe |= {*self.acknowledged, step}
        self.acknowledged = {kept for kept in self.acknowledged if kept <= step}
        kept = {*self.acknowledged, step}
        # In the log that it knows, these are kept already, and nothing below them.
        with self.world.ledger.giving_up(self.name, None, lambda: min({*kept, *self._stays()})):
            record = await group.go_back(step, kept, self.maybe - kept)
        self._confirmed(step, record)
        return step

    def _stays(self) -> tuple[Step, ...]:
        """What a group keeps whose run says what it resumes from: who names the whole set drops the rest."""
        record = self.world.ledger.control.groups.get(self.name)
        return record.kept if record is not None and self.plan.one_by_one else ()
