"""A whole cluster in one process: producers, training runs, mounts and reclaimers over one store that misbehaves.

    scenario (pure)  →  processes with lives (killed, frozen, restarted)  →  quiet  →  last reclaim  →  audit

The actors run stepfs unmodified; only sizes are scaled down, so that twenty steps cross as many segment, snapshot and
floor boundaries as twenty thousand would. `simulate(seed)` is a function: same seed, same trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import trio
from actors import FollowerActor, ProducerActor, WatcherActor
from audit import audit
from cluster_world import World, inline_threads, simulated_wall_clocks
from decoded_once import decoded_once
from deterministic import run_seeded, scaled
from doubles.faults import Plan, no_faults
from doubles.faulty_store import Event, ObjectMap
from draw import Storm, scenario
from flavours import Flavour
from forks import ForkActor
from lakework import list_groups, reclaim
from ledger import Ledger, life_began_in
from lying_carriers import lying_carriers
from operators import ReclaimerActor, SealerActor
from process_store import ProcessStore
from replicas import Copy
from scenario import Life, RollBack, Scenario
from trainers import TrainerActor
from watched_run import NodeActor, WatchedRun, WatchedTrainer

from stepfs.errors import StepfsError, leaves
from stepfs.format.grid import Grid
from stepfs.format.identity import FORK_GROUP, REPLICA_GROUP, LakeIdentity, encode_lake
from stepfs.format.ids import Step
from stepfs.format.keys import LAKE
from stepfs.lake.control import Control, Group
from stepfs.lake.log.reader import LogReader

_VIRTUAL_S_MAX = 4 * 3600.0
_SETTLED_S = 120.0  # longer than any fault delays what it delays
_LATER_S = 1.0
_QUIET = Life()


class Actor(Protocol):
    name: str

    async def main(self, store: ProcessStore) -> bool: ...


@dataclass(frozen=True)
class Outcome:
    """What came of one seed; `broken` is empty when every invariant held."""

    seed: int
    broken: list[str]
    digest: str
    counts: Counter[str]
    trace: list[Event]
    virtual_s: float


def simulate(seed: int, *, flavour: Flavour | None = None) -> Outcome:
    """Run the scenario of `seed` from an empty lake to the audit."""
    return run_scenario(scenario(seed, flavour=flavour))


def run_scenario(plan: Scenario) -> Outcome:
    """Run one scenario. Never raises for what goes wrong inside; that is in `broken`."""
    sizes: dict[str, Any] = {
        "SEGMENT_STEPS": plan.segment_steps,
        "_VERSIONS_MAX": plan.versions_max,
        "_MISSES_PER_FLOOR_PROBE": 5,
        "_KEPT_MIN": 1,
        "LEVELS": (2, 4),
        "_JUMP_VERSIONS": 6,
    }
    with scaled(**sizes), simulated_wall_clocks(), inline_threads(), decoded_once(), lying_carriers(plan.seed):
        return run_seeded(_Cluster(plan).run, seed=plan.seed)


class _Cluster:
    def __init__(self, plan: Scenario) -> None:
        self.plan = plan
        self.shared = ObjectMap()
        identity = LakeIdentity(f"{plan.seed:032x}", Grid(plan.slices), ".pt", 0)
        self.shared.put(LAKE, encode_lake(identity))
        self.ledger = Ledger(self.shared, identity, plan.segment_steps)
        self.ledger.graces_s = {one.name: one.grace_s for one in plan.reclaimers}
        self.totals = {producer.name: producer.total for producer in plan.producers}
        self.world = World(self.ledger, plan.seed, sum(self.totals.values()))
        self.world.lying = plan.lying
        self.runs = [WatchedRun(self.world, watched) for watched in plan.watched]
        self.forks = [ForkActor(self.world, forked) for forked in plan.forks]
        self.copies = [Copy(self.world, replica) for replica in plan.replicas]
        self.went_back = trio.Event()
        self.done_in: dict[str, int] = {}  # process → the era in which its work was done
        self.faults: Plan = Storm(plan.faults, trio.current_time) if plan.faults else no_faults

    async def run(self) -> Outcome:
        self.world.set_wall_clock("end", skewed=False)
        with trio.CancelScope() as scope:
            self.ledger.stop = scope.cancel
            with trio.move_on_after(_VIRTUAL_S_MAX) as limit:
                try:
                    await self._lifetime()
                    await self._end()
                except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding with a seed
                    self.ledger.blame(f"the end: {_one_line(error)}")
            if limit.cancelled_caught:
                self.ledger.blame(f"not done after {_VIRTUAL_S_MAX:.0f} virtual seconds")
        return Outcome(
            seed=self.plan.seed, broken=self.ledger.broken, digest=self.shared.digest(), counts=self.ledger.counts,
            trace=self.shared.trace, virtual_s=trio.current_time(),
        )  # fmt: skip

    async def _lifetime(self) -> None:
        """Until every producer and trainer has reached its goal."""
        async with trio.open_nursery() as background:
            for reclaimer in self.plan.reclaimers:
                background.start_soon(self._process, ReclaimerActor(self.world, reclaimer), reclaimer.lives, 0.0)
            for follower in self.plan.followers:
                background.start_soon(self._process, FollowerActor(self.world, follower), follower.lives, 0.0)
            for copy in self.copies:
                for one, lives in copy.actors():
                    background.start_soon(self._process, one, lives, 0.0)
            async with trio.open_nursery() as nursery:
                for actor, lives, begins_s in self._cast():
                    nursery.start_soon(self._process, actor, lives, begins_s)
                if self.plan.roll_back is not None:
                    nursery.start_soon(self._roll_back, self.plan.roll_back)
                for number, rot in enumerate(self.plan.rots):
                    nursery.start_soon(self.world.damage.inflict, rot, self.world.rng(f"rot/{number}"))
            self.world.over.set()

    async def _roll_back(self, plan: RollBack) -> None:
        """An operator copies the store, and later stops the server and puts the copy back."""
        await trio.sleep(plan.copied_s)
        self.shared.settle(trio.current_time())
        put_back = self.ledger.copied()
        await trio.sleep(plan.lasts_s)
        self.shared.settle(trio.current_time())
        self.ledger.begin_era()
        self.shared.away_until_s = trio.current_time() + plan.away_s + 0.001
        put_back()
        await trio.sleep(plan.away_s)
        put_back()  # what was on the way is lost
        self.ledger.counts["roll-backs"] += 1
        self.went_back.set()

    def _cast(self) -> Iterator[tuple[Actor, tuple[Life, ...], float]]:
        """Everybody who works towards the end, with their lives and when they begin."""
        world, plan = self.world, self.plan
        for producer in plan.producers:
            yield ProducerActor(world, producer), producer.lives, producer.begins_s
        for trainer in plan.trainers:
            yield TrainerActor(world, trainer), trainer.lives, trainer.begins_s
        for run in self.runs:
            yield WatchedTrainer(run), run.plan.lives, 0.0
            node = run.plan.node
            yield NodeActor(run, node), node.lives, 0.0
        for forked in self.forks:
            yield forked, forked.plan.lives, forked.plan.begins_s
        for watcher in plan.watchers:
            yield WatcherActor(world, watcher.name), watcher.lives, watcher.begins_s
        if plan.seal:
            yield SealerActor(world), (), 0.0

    async def _process(self, actor: Actor, lives: tuple[Life, ...], begins_s: float) -> None:
        """One process through its lives; the last ones are undisturbed and repeat until its work is done. An operator starts it
        again where the store has lost what it did.
        """
        await trio.sleep(begins_s)
        await self._until_done(actor, lives)
        if self.plan.roll_back is not None and self.done_in[actor.name] == 0:
            await self.went_back.wait()
            await self._until_done(actor, ())

    async def _until_done(self, actor: Actor, lives: tuple[Life, ...]) -> None:
        done = trio.Event()
        async with trio.open_nursery() as nursery:
            number = 0
            while not done.is_set():
                life = lives[number] if number < len(lives) else _QUIET
                successor_due = trio.Event()
                nursery.start_soon(self._live, actor, number, life, successor_due, done)
                await successor_due.wait()
                number += 1
                if not done.is_set():
                    await trio.sleep(life.restart_s)

    async def _live(self, actor: Actor, number: int, life: Life, successor_due: trio.Event, done: trio.Event) -> None:
        self.world.set_wall_clock(f"{actor.name}.{number}", skewed=self.plan.skewed)
        era = self.ledger.era
        life_began_in.set(era)
        store = ProcessStore(
            self.shared, actor=f"{actor.name}.{number}", seed=self.plan.seed, plan=self.faults, page=self.plan.page,
            times=self.plan.far.get(actor.name, 1.0),
        )  # fmt: skip
        with trio.CancelScope() as scope:
            store.kill_at, store.kill = life.kill_at, scope.cancel
            store.freeze_at, store.freeze_s = life.freeze_at, life.freeze_s
            store.stalls, store.stall_s, store.stalls_before = life.stalls, life.stall_s, life.stalls_before
            store.killed_sending, store.cut_off = life.killed_sending, life.cut_off
            if life.locked_out_s is not None:
                now_s = trio.current_time()
                store.locked_out_s = now_s + life.locked_out_s[0], now_s + life.locked_out_s[1]
            if life.replaced:
                store.on_freeze = successor_due.set
            try:
                if await actor.main(store) and era == self.ledger.era:
                    self.done_in[actor.name] = era
                    done.set()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding with a seed
                if era != self.ledger.era and all(isinstance(leaf, StepfsError) for leaf in leaves(error)):
                    self.ledger.counts["another history noticed"] += 1
                elif self.world.excuses(_single(error)):
                    self.ledger.counts["damage reported"] += 1
                elif not store.dead:
                    self.ledger.blame(f"{actor.name}.{number}: {_one_line(error)}")
            finally:
                store.dead = True
        self.ledger.counts["kills"] += scope.cancelled_caught
        self.ledger.counts["freezes"] += life.freeze_at is not None and store.pauses >= life.freeze_at
        successor_due.set()

    async def _end(self) -> None:
        """Let everything land, let every group move to the end, reclaim, and look."""
        self.faults = no_faults
        await trio.sleep(_SETTLED_S)
        self.shared.settle(trio.current_time())
        store = ProcessStore(self.shared, actor="end", seed=self.plan.seed)
        rng = self.world.rng("end")
        identity, end = self.ledger.identity, len(self.ledger.steps)
        for copy in self.copies:
            copy.place.shared.settle(trio.current_time())
            await copy.end(store)
        for name in [*(run.name for run in self.plan.trainers), *(run.name for run in self.plan.watched)]:
            step = rng.choice((end, rng.randint(self.ledger.promises[name], end)))
            self.ledger.promises[name] = step
            await Group.of(store, identity, name, self.world.clock).replace(frozenset({Step(step)}))
        await self._let_go_of_forks(store)
        grace_s = max(self.ledger.graces_s.values(), default=0.0)
        await trio.sleep(grace_s + _LATER_S)
        await reclaim(store, identity, clock=self.world.clock, orphans=True, grace_s=grace_s)
        self.ledger.require(
            self.plan.roll_back is None or self.went_back.is_set(), "the copy that was to be put back was not"
        )
        audit(self.ledger, self.totals, await LogReader.open(store, identity))
        self.ledger.require(
            self.ledger.first_live_step == self.ledger.first_needed,
            f"needed from {self.ledger.first_needed}, kept from {self.ledger.first_live_step}",
        )
        for copy in self.copies:
            await copy.audit(store)

    async def _let_go_of_forks(self, store: ProcessStore) -> None:
        """An operator retires what forks hold: those that came to be are done, those that died half-made never will. So
        with replicas, of which the one that is left is copied to its end.
        """
        for name in {name for forked in self.forks for name in forked.groups}:
            self.ledger.release(name)
        for name in await list_groups(store, self.ledger.identity):
            if name.startswith((FORK_GROUP, REPLICA_GROUP)):
                await Group(Control(store, self.ledger.identity, self.world.clock), name).retire()


def _single(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _one_line(error: BaseException) -> str:
    error = _single(error)
    cause = f" (from {type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else ""
    return f"{type(error).__name__}: {error}{cause}"
