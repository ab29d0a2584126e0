"""The simulator: seeds of today, what takes part, and what its oracle must see or forgive."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import partial
from random import Random

import pytest
import trio
from actors import ProducerActor
from cluster import simulate
from cluster_world import World as Stage
from doubles.faults import STALE_404
from draw import Storm, scenario
from forks import ForkActor
from process_store import ProcessStore
from producer_world import World
from replica_stores import Pair
from replicas import RUN, Copy, Place
from scenario import ForkPlan, ProducerPlan, ReplicaPlan, TrainerPlan
from scenarios import scenario as scenario_of
from small_world import NEED, STEPS, clean, flipped, group, grow, inside_everywhere, lands_late, move_on, process, small
from sweep import sweep
from trainers import Door, OneByOne, TrainerActor, WholeSet

from stepfs.errors import StoreUnreachableError
from stepfs.format.control import NOTHING_YET, GroupRecord
from stepfs.format.ids import Step
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.snapshot import LogState
from stepfs.lake.control import Group
from stepfs.lake.decisions import Add
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Buffer
from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit.rebase import Incarnation, NothingLeft, Stamp

SEEDS = 900
PART = SEEDS // 180  # a push's; at night all of them
_FIRST = "STEPFS_SIMULATE_FIRST"

# What all seeds must have met to mean anything: how often, at least.
_MET = {
    "data commits": 4000, "epoch commits": 1800, "seal commits": 54, "kills": 1000, "freezes": 400, "fenced": 54,
    "landed late": 120, "zombie slots": 80, "reclaims": 1200, "deleted data": 4800, "withdrawn": 54,
    "reclaims cut short": 80, "watched changes": 480, "damage reported": 6, "forks": 7, "rotten log": 2,
    "rotten snapshot": 2, "replicas": 60, "steps read there": 400, "holds for a run there": 60,
    "roll-backs": 20, "another history noticed": 20,
}  # fmt: skip


def first_seed(today: date) -> int:
    """Every day its own stretch of seeds, far above those that people type."""
    return 10_000_000 + today.toordinal() * SEEDS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [PART, pytest.param(SEEDS, marks=pytest.mark.nightly)])
def test_the_seeds_of_today_hold_every_invariant(count: int) -> None:
    first = int(os.environ.get(_FIRST) or first_seed(datetime.now(UTC).date()))
    again = f"again: scripts/simulate --first {first} --seeds {count}, or {_FIRST}={first} scripts/test"
    sys.stdout.write(f"seeds {first} to {first + count - 1}; {again}\n")
    met: Counter[str] = Counter()
    for outcome in sweep(range(first, first + count)):
        assert not outcome.broken, f"scripts/simulate --seed {outcome.seed} --trace: {outcome.broken}; {again}"
        met += outcome.counts
    wanted = _MET if count == SEEDS else {}
    missed = {what: met[what] for what, least in wanted.items() if met[what] < least}
    assert not missed, f"the seeds did not meet enough of {missed}; {again}"


def test_no_two_days_share_a_seed() -> None:
    monday, tuesday = date(2026, 11, 23), date(2026, 11, 24)
    assert first_seed(tuesday) - first_seed(monday) == SEEDS


@pytest.mark.logs(".*")
@pytest.mark.timeout(300)
def test_a_seed_replays_to_the_same_trace() -> None:
    """Twice in this process, and once in a process with another hash seed, after other seeds."""
    seeds = range(40, 44)
    here = [simulate(seed).digest for seed in seeds]
    assert [simulate(seed).digest for seed in reversed(seeds)] == here[::-1]
    assert [outcome.digest for outcome in sweep(seeds, processes=1)] == here
    assert len(set(here)) == len(here)


def test_some_of_every_kind_take_part() -> None:
    """What the simulator knows is drawn, and a lake is shared by one to sixteen producers."""
    plans = [scenario(seed) for seed in range(2000)]
    crowds = Counter(len(plan.producers) for plan in plans)
    assert set(range(1, 17)) <= set(crowds)
    assert sum(count for producers, count in crowds.items() if producers <= 3) > 1500, "most are small"
    for met in (
        [plan for plan in plans if plan.watched],
        [plan for plan in plans if plan.forks],
        [plan for plan in plans if plan.replicas],
        [plan for plan in plans if any(replica.keeps_all for replica in plan.replicas)],
        [plan for plan in plans if plan.rots],
        [plan for plan in plans if plan.lying],
        [plan for plan in plans if plan.page],
        [plan for plan in plans if plan.roll_back],
        [plan for plan in plans if plan.skewed],
        [plan for plan in plans if any(trainer.one_by_one for trainer in plan.trainers)],
        [plan for plan in plans if any(life.locked_out_s for one in plan.producers for life in one.lives)],
    ):
        assert len(met) > 50


RECORDS = 3


def _plan(*, retire: bool) -> ProducerPlan:
    return ProducerPlan("r", RECORDS, gap_s=0.0, max_delay_s=5.0, retire=retire, begins_s=0.0, lives=())


def _actor(world: World, *, retire: bool) -> ProducerActor:
    return ProducerActor(Stage(world.ledger, seed=0, total_steps=0), _plan(retire=retire))


async def _retires(world: World, store: ProcessStore) -> None:
    await _actor(world, retire=True).main(store)


async def _succeeds(world: World) -> None:
    await _actor(world, retire=False).main(process(world, "successor"))


def _a_successor_everywhere() -> Counter[str]:
    """How the producer that retires ended, for a successor inside each of its awaits."""
    endings: Counter[str] = Counter()

    async def look(world: World) -> None:
        assert world.ledger.published["r"] == RECORDS
        outlived = world.ledger.farewells and not world.ledger.state.producers["r"].retired
        endings["fenced"] += world.ledger.counts["fenced"]
        endings["said goodbye, and its successor lives"] += bool(outlived)

    assert inside_everywhere(grow, _retires, _succeeds, look) > 20
    return endings


def test_a_producer_has_retired_though_its_successor_starts_before_it_hears_so() -> None:
    """Seeds 501644 and 1006135: its goodbye is in the log, and a start after it is allowed. `retire()` told the truth."""
    endings = _a_successor_everywhere()
    assert endings["fenced"] > 10
    assert endings["said goodbye, and its successor lives"] > 0


def test_mutant_a_producer_that_only_says_that_it_has_retired_is_found(monkeypatch):
    """The oracle asks the log and not the state that a successor has changed since; it still notices a lie."""

    def pretend(head: LogState, me: Incarnation, _stamp: Stamp) -> NothingLeft:
        return NothingLeft(replace(head.producers[me.producer_id], retired=True))

    monkeypatch.setattr(commit_loop, "rebase_retire", pretend)
    with pytest.raises(AssertionError, match="did not retire"):
        _a_successor_everywhere()


async def _rotten(world: World) -> None:
    await grow(world)
    flipped(world, numbered(log_prefix(world.identity.lake_id), world.ledger.state.version))


@pytest.mark.nightly
def test_a_fork_of_a_damaged_log_that_is_mended_and_reclaimed_meanwhile_may_be_refused() -> None:
    """Seed 91018489: it read a log that ended at the damage, and slept until a reclaim had passed that end."""
    met: Counter[str] = Counter()

    async def forks(world: World, store: ProcessStore) -> None:
        plan = ForkPlan("f", every=3, step_s=0.0, begins_s=0.0, lives=(), until_damage=True)
        await ForkActor(Stage(world.ledger, seed=0, total_steps=0), plan).main(store)

    async def is_mended_and_reclaimed(world: World) -> None:
        flipped(world, numbered(log_prefix(world.identity.lake_id), world.ledger.state.version))
        await move_on(world)

    async def look(world: World) -> None:
        met.update(world.ledger.counts)
        groups = world.ledger.control.groups
        assert {"run"} <= groups.keys() <= {"run", *world.ledger.promises}, "a fork that was refused holds nothing"

    assert inside_everywhere(_rotten, forks, is_mended_and_reclaimed, look) > 10
    assert met["forks overtaken"] > 0
    assert met["forks"] > 0


def test_a_storm_ends() -> None:
    """Seed 60000862: a trainer that needs fifty requests, each without a retry, found no such moment in four hours."""
    now_s = 0.0
    storm = Storm({STALE_404: 1.0}, lambda: now_s)
    assert storm("get", "lake/log/0", Random(0)) is STALE_404
    now_s = 2.5 * 3600
    assert storm("get", "lake/log/0", Random(0)) is None


def test_no_producer_waits_for_a_checkpoint_that_was_brought_back() -> None:
    """Seed 70000632: killed between bringing an old one back and resuming from it, the trainer went on without it."""
    bounded = [plan for plan in map(scenario, range(2000)) if any(one.max_lead for one in plan.producers)]
    assert len(bounded) > 20
    assert not any(run.behind or run.retires for plan in bounded for run in plan.trainers)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_run_whose_checkpoint_was_never_confirmed_says_that_it_goes_on_from_it(*, one_by_one: bool) -> None:
    """Seed 4013: killed at five checkpoints in a row, it read on, and producers with a bounded lead waited for it."""

    async def restarted(world: World) -> tuple[Step, ...]:
        await grow(world)
        plan = TrainerPlan("new", 2, 2, 0.0, 0.0, 0.0, 0.0, one_by_one=one_by_one, lives=())
        trainer = TrainerActor(Stage(world.ledger, seed=0, total_steps=8), plan)
        trainer.start, trainer.newest, trainer.maybe = 0, 8, {2, 8}
        world.ledger.promise("new", 0)
        assert await trainer.main(process(world, "new"))
        return world.ledger.control.groups["new"].kept

    assert 8 in small(restarted)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_nothing_of_a_former_life_of_a_run_lands_any_more(*, one_by_one: bool) -> None:
    """Seed 4006547: the set that it named was on record already, and took no slot; a mount registers when it begins."""

    async def restarted(world: World) -> bool:
        plan = TrainerPlan("run", 2, 2, 0.0, 0.0, 0.0, 0.0, one_by_one=one_by_one, lives=())
        trainer = TrainerActor(Stage(world.ledger, seed=0, total_steps=NEED), plan)
        trainer.start, trainer.newest, trainer.acknowledged, trainer.maybe = 0, NEED, {NEED}, {3}
        assert await trainer.main(process(world, "run"))
        return await lands_late(world, Add("run", Step(3)))

    assert not small(restarted, on=grow)


class _PutBackMeanwhile:
    """A door behind which the store is put back once it was asked, and before it answers."""

    def __init__(self, door: Door, put_back: Callable[[], None]) -> None:
        self.door, self.put_back = door, put_back

    async def begin(self) -> None:
        await self.door.begin()

    async def add(self, step: int, *, keep: int | None = None) -> GroupRecord:
        self.put_back()
        return await self.door.add(step, keep=keep)

    async def go_back(self, step: int, kept: set[int], newer: set[int]) -> GroupRecord:
        self.put_back()
        return await self.door.go_back(step, kept, newer)


async def _behind_a_roll_back(
    world: World, copied: Sequence[Step], lost: Sequence[Step], plan: TrainerPlan, *, asked: bool
) -> tuple[TrainerActor, Door]:
    """A run whose checkpoints `lost` are in no copy: the store is put back, or will be once it has `asked` for the next."""
    run = group(world, plan.name)
    await run.register()
    for kept in copied:
        await run.add(kept)
    world.ledger.promise(plan.name, min(copied, default=0))
    restore = world.ledger.copied()
    for kept in lost:
        await run.add(kept)
    world.ledger.promise(plan.name, min((*copied, *lost)))

    def put_back() -> None:
        world.ledger.begin_era()
        restore()

    trainer = TrainerActor(Stage(world.ledger, seed=0, total_steps=STEPS), plan)
    door: Door = (OneByOne if plan.one_by_one else WholeSet)(trainer.world, plan.name, process(world, plan.name))
    if asked:
        door = _PutBackMeanwhile(door, put_back)
    else:
        put_back()
    trainer.reader = await LogReader.open(process(world, plan.name), world.identity)
    trainer.acknowledged, trainer.order = {*copied, *lost}, (*copied, *lost)
    return trainer, door


def _run(keep: int, *, one_by_one: bool) -> TrainerPlan:
    return TrainerPlan("new", 2, keep, 0.0, 0.0, 0.0, 0.0, one_by_one=one_by_one, lives=())


async def _given_up(world: World) -> int:
    """What the run is held to, and no more: the lake gives up all below it."""
    promised = world.ledger.promises["new"]
    assert (await clean(world)).first_live_step == promised
    assert not world.ledger.broken
    return promised


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_run_that_saves_behind_a_roll_back_gives_up_what_the_older_copy_lets_go(
    *, one_by_one: bool, asked: bool, keep: int
) -> None:
    """Seed 6014393: the copy lacks a checkpoint that the run keeps. What the copy keeps besides the new one stays promised.
    Seed 7001067: the store was put back while the run waited for its answer.
    """

    async def saves(world: World, copied: tuple[Step, ...]) -> int:
        trainer, door = await _behind_a_roll_back(
            world, copied, (Step(6),), _run(keep, one_by_one=one_by_one), asked=asked
        )
        await trainer._checkpoint(door, 8)
        return await _given_up(world)

    stays = (Step(2), Step(4), Step(8))[-keep:]
    assert small(partial(saves, copied=(Step(2), Step(4))), on=grow) == stays[0]
    assert small(partial(saves, copied=()), on=grow) == 8


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_run_that_goes_on_behind_a_roll_back_gives_up_what_the_older_copy_was_promised(
    *, one_by_one: bool, asked: bool
) -> None:
    """Seed 4001056: it says what it resumes from to the group as that was. What the group keeps besides stays promised."""

    async def goes_on(world: World, copied: tuple[Step, ...]) -> int:
        lost = (Step(4), Step(8))
        trainer, door = await _behind_a_roll_back(world, copied, lost, _run(2, one_by_one=one_by_one), asked=asked)
        trainer.acknowledged = {*lost}
        await trainer._resume(door, 4)
        return await _given_up(world)

    assert small(partial(goes_on, copied=()), on=grow) == 4
    assert small(partial(goes_on, copied=(Step(2),)), on=grow) == (2 if one_by_one else 4)


def test_the_oracle_holds_a_lake_that_was_put_back_to_all_that_the_copy_keeps() -> None:
    """Whose request has been answered gives up nothing more; nor does one give up more than the copy lets go."""

    async def answered(world: World) -> None:
        ledger = world.ledger
        ledger.promise("new", 2)
        put_back = ledger.copied()
        with ledger.giving_up("new", 6, lambda: 4):
            assert ledger.promises["new"] == 6
        ledger.begin_era()
        put_back()
        assert ledger.promises["new"] == 2

    async def waits(world: World) -> None:
        ledger = world.ledger
        ledger.promise("new", 2)
        put_back = ledger.copied()
        with ledger.giving_up("new", 6, lambda: 4):
            ledger.begin_era()
            put_back()
            assert ledger.promises["new"] == 4

    small(answered, on=grow)
    small(waits, on=grow)


@pytest.mark.logs("held back by max_lead")
@scenario_of(small, on=grow)
async def test_a_producer_that_gives_up_a_ticket_ends_although_its_lead_is_bounded(world: World) -> None:
    """Seeds 4001296 and 4003505: behind that ticket it waited for ever to be admitted."""
    store = process(world, "t")
    put = store.put

    async def away(key: str, parts: Sequence[Buffer], **options: int | None) -> None:
        if trio.current_time() < 60:
            await trio.sleep(1)
            raise StoreUnreachableError("away")
        await put(key, parts, **options)

    store.put = away  # type: ignore[method-assign]
    plan = ProducerPlan("t", 9, 0.0, 0.0, False, 0.0, lives=(), max_lead=STEPS - NEED + 3, constructors=1)
    with trio.fail_after(100):
        assert not await ProducerActor(Stage(world.ledger, seed=0, total_steps=STEPS + 9), plan).main(store)
    assert world.ledger.counts["tickets given up"] == 1


@scenario_of(small, on=grow)
async def test_nobody_answers_for_a_replica_in_whose_place_another_one_was_begun(world: World) -> None:
    """Seed 4000713: both have one name, and so one group at the lake."""
    pair = Pair(world)
    replica = await pair.replicated("it")
    await Group.of(pair.store, world.identity, RUN).register()
    await replica.log.confirm()
    copy = Copy(Stage(world.ledger, seed=0, total_steps=STEPS), ReplicaPlan("c", 1.0, 2, False, (), ()))
    former, copy.place = copy.place, Place(copy.world, copy.url)
    copy.place.shared.objects.update(pair.place.objects)
    copy.check_hold(replica, former)
    assert not world.ledger.broken
    copy.check_hold(replica, copy.place)
    assert world.ledger.broken


async def test_a_group_that_is_being_retired_needs_what_it_has_on_record() -> None:
    """Seed 96006024: a fork came and went while the retirement of the only group hung; what that had given up may go."""
    ledger = (await World.create()).ledger
    ledger.controls = [replace(NOTHING_YET, groups={"run": GroupRecord(Step(0), (Step(1),))})]
    ledger.promise("run", 1)
    ledger.release("run")
    ledger.promise("fork", 0)
    assert ledger.first_needed == 0
    ledger.release("fork")
    assert ledger.first_needed == 1
    ledger.controls.append(NOTHING_YET)
    assert ledger.first_needed == 0, "nobody is left, and what the last one needed stays"
