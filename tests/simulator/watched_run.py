"""A training run whose checkpoint directory is watched by a mount.

The trainer says nothing to the lake. It writes checkpoints into a directory and deletes old ones; the mount looks at
that directory, perhaps through a network file system that shows it late, and records what changed. What the lake
owes them is that the run can resume from every checkpoint that is in the directory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import trio
from cluster_world import World
from following import Following, read_step
from process_store import ProcessStore
from scenario import NodePlan, WatchedPlan

from stepfs.checkpoints.formats import Found, NextStep, Place
from stepfs.checkpoints.watch import Watch
from stepfs.errors import StoreUnreachableError, WithdrawnError
from stepfs.format.control import GroupRecord
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.log.reader import LogReader

_UNUSED = Place(Path("/unused"))


@dataclass
class Directory:
    """The shared checkpoint directory, and how it looked before."""

    history: list[tuple[float, frozenset[int]]] = field(default_factory=lambda: [(0.0, frozenset())])

    @property
    def complete(self) -> frozenset[int]:
        return self.history[-1][1]

    def change(self, complete: frozenset[int]) -> None:
        self.history.append((trio.current_time(), complete))

    def seen(self, lag_s: float) -> Found:
        """How it looks to a node whose file system is `lag_s` behind."""
        at_s = trio.current_time() - lag_s
        known = [complete for since_s, complete in self.history if since_s <= at_s]
        return Found((known or [frozenset()])[-1], frozenset())


class WatchedRun:
    """What the trainer and the nodes of one run share."""

    def __init__(self, world: World, plan: WatchedPlan) -> None:
        self.world, self.plan = world, plan
        self.directory = Directory()
        self.start: int | None = None
        self.finished = trio.Event()

    def hold(self, complete: frozenset[int]) -> None:
        """The directory becomes this: what goes is given up before, what comes is owed from then on."""
        assert self.start is not None
        kept = self.directory.complete & complete
        if kept:
            self.world.ledger.promises[self.plan.name] = min(kept)
        self.directory.change(complete)


class WatchedTrainer:
    """Consumes every step in order, writes and deletes checkpoints, sometimes goes back. Its disk survives it."""

    def __init__(self, run: WatchedRun) -> None:
        self.run, self.world, self.plan = run, run.world, run.plan
        self.name = run.plan.name
        self.rng = self.world.rng(self.name)

    async def main(self, store: ProcessStore) -> bool:
        run, world, ledger = self.run, self.world, self.world.ledger
        try:
            reader = await LogReader.open(store, ledger.identity)
            if run.start is None:
                group = Group.of(store, ledger.identity, self.name, world.clock)
                run.start = (await group.register()).need
                ledger.promise(self.name, run.start)
            step = max(run.directory.complete, default=run.start)
            follow = Following(self.name, ledger)
            while step < world.total_steps:
                await follow.until(reader, step)
                await read_step(self.name, ledger, store, reader, Step(step))
                step += 1
                await trio.sleep(self.plan.step_s)
                if step % self.plan.every == 0 or step == world.total_steps:
                    step = self._save(step)
        except StoreUnreachableError:
            return False
        run.finished.set()
        return True

    def _save(self, step: int) -> int:
        """Write a checkpoint, delete the oldest; or resume from an earlier one, deleting what came after it."""
        run = self.run
        run.hold(run.directory.complete | {step})
        run.hold(frozenset(sorted(run.directory.complete)[-self.plan.keep :]))
        if self.rng.random() < self.plan.rollback:
            step = self.rng.choice(sorted(run.directory.complete))
            run.hold(frozenset(kept for kept in run.directory.complete if kept <= step))
        return step


class NodeActor:
    """One mount's watch of the directory, until the trainer has finished and this node has seen its last checkpoint."""

    def __init__(self, run: WatchedRun, plan: NodePlan) -> None:
        self.run, self.plan, self.name = run, plan, plan.name

    async def main(self, store: ProcessStore) -> bool:
        run, world = self.run, self.run.world
        group = Group.of(store, world.ledger.identity, run.plan.name, world.clock)
        watch = Watch(
            group, _UNUSED, NextStep("N"), changed=self._changed, look_at=lambda: run.directory.seen(self.plan.lag_s),
        )  # fmt: skip
        last = registered = False
        while True:
            try:
                if not registered:
                    await group.register()  # as a mount does: nothing that its former life sent can land any more
                    registered = True
                await group.read()
                await watch.look_once()
                if last:
                    return True
            except StoreUnreachableError:
                pass
            except WithdrawnError:
                world.ledger.counts["withdrawn"] += 1
                if last:
                    return True  # an old view of the directory showed what was reclaimed
            last = run.finished.is_set()
            await trio.sleep(self.plan.lag_s if last else self.plan.poll_s)

    def _changed(self, record: GroupRecord | None) -> None:
        ledger = self.run.world.ledger
        ledger.counts["watched changes"] += 1
        if record is not None:
            ledger.check_record(self.name, self.run.plan.name, record)
