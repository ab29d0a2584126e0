"""Control records as a sequence: own ones, unanswered ones, refusals, and holes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from controlled import control_keys
from deterministic import scaled
from doubles.faults import ERROR_500, delayed
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from lakework import list_groups, reclaim
from process_store import ProcessStore
from producer_world import World
from scenarios import scenario
from small_world import GROWN, NEED, checkpoint, clean, group, grow, process, register, small

from stepfs.errors import AbsentError, RefusedError, StoreUnreachableError, WithdrawnError
from stepfs.format.grid import Grid
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Step, Version
from stepfs.format.keys import log_prefix
from stepfs.lake.control import Control, Group
from stepfs.lake.decisions import Advance
from stepfs.lake.identity import create_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim.run import Reclaimer
from stepfs.lake.verify.repair import repair_control
from stepfs.store.api import Put
from stepfs_producer import AsyncProducer

LAKE = LakeIdentity("0" * 32, Grid(1), ".bin", 0)
LATE_S = 100.0


def control_on(store, **options):
    return Control(store, LAKE, TrioClock(), **options)


def run_of(control):
    return Group.on(control, "run")


class Interrupted(FaultyStore):
    """Calls `meanwhile` once, before it lists the log."""

    meanwhile = None

    async def list(self, prefix, **options):
        meanwhile, self.meanwhile = self.meanwhile, None
        if prefix == log_prefix(LAKE.lake_id) and meanwhile is not None:
            await meanwhile()
        else:
            self.meanwhile = meanwhile
        return await super().list(prefix, **options)


def slow_creates(verb, _size, _rng):
    return 2.0 if verb == "create" else 0.0


async def test_an_own_record_that_another_task_reads_first_is_no_lost_slot(autojump_clock):
    store = FaultyStore(latency=slow_creates)
    control = control_on(store)
    await run_of(control).add(Step(5))
    await run_of(control).add(Step(6))

    async def follow():
        await trio.sleep(1.5)  # the create has landed, its answer is on its way
        assert await control.refresh()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        record = await run_of(control).drop(Step(5))
    assert record.kept == (6,)
    assert control.number == 2


async def test_a_change_returns_its_own_record_though_a_newer_one_is_known(autojump_clock):
    store = FaultyStore(latency=slow_creates)
    control = control_on(store)
    await run_of(control).add(Step(5))

    async def retire():
        other = control_on(FaultyStore(store.shared, latency=lambda *_: 0.0))
        await trio.sleep(1.2)
        await run_of(other).retire()
        await control.refresh()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(retire)
        record = await run_of(control).add(Step(6))
    assert record.kept == (5, 6)
    assert control.groups == {}


class GoesDown:
    """A plan: the first create has no answer and lands late, and every request after it fails until `down` is False."""

    def __init__(self):
        self.down = None

    def __call__(self, verb, _key, _rng):
        if self.down is None and verb == "create":
            self.down = True
            return delayed(LATE_S)
        return ERROR_500 if self.down else None


async def landed(store):
    await trio.sleep(2 * LATE_S)
    store.shared.settle(trio.current_time())
    return await run_of(control_on(store)).read()


async def test_the_next_call_settles_a_request_without_an_answer_before_it_believes_a_record(autojump_clock):
    """The model's mutant 4: register believes what is there, and the request of the call before undoes it."""
    store = FaultyStore()
    await run_of(control_on(store)).register()
    plan = GoesDown()
    control = control_on(FaultyStore(store.shared, plan=plan))
    with pytest.raises(StoreUnreachableError):
        await run_of(control).add(Step(5), keep=1)
    assert control.is_unanswered
    plan.down = False
    believed = await run_of(control).register()
    assert not control.is_unanswered
    assert await landed(store) == believed


async def test_a_request_without_an_answer_comes_first_though_the_next_one_fences_nothing(autojump_clock):
    """A mount that keeps checkpoint 5 on record would believe that it is kept, and the late request drops it."""
    store = FaultyStore()
    await run_of(control_on(store)).add(Step(5))
    plan = GoesDown()
    control = control_on(FaultyStore(store.shared, plan=plan))
    with pytest.raises(StoreUnreachableError):
        await run_of(control).add(Step(9), keep=1)
    plan.down = False
    believed = await run_of(control).revise(lambda kept: kept | {Step(5)})
    assert believed.kept == (5, 9)
    assert await landed(store) == believed


async def test_a_new_process_fences_a_request_of_the_one_before(autojump_clock):
    """The model's mutant 3: what is on record already is said again, and takes the slot of the late request."""
    store = FaultyStore()
    await run_of(control_on(store)).add(Step(4))
    killed = control_on(FaultyStore(store.shared, plan=GoesDown()))
    with pytest.raises(StoreUnreachableError):
        await run_of(killed).add(Step(9), keep=1)
    believed = await run_of(control_on(store)).resumed(Step(4))
    assert believed.kept == (4,)
    assert await landed(store) == believed


async def advanced(store, first_live, **options):
    control = control_on(store, **options)
    await control.refresh()
    return await control.advance(Advance(Step(first_live), Version(0), 0))


async def test_a_refusal_writes_nothing(autojump_clock):
    store = FaultyStore()
    control = control_on(store)
    await run_of(control).add(Step(5))
    assert await advanced(store, 5)
    before = dict(store.shared.objects)
    group = run_of(control)
    for call in (group.add(Step(4)), group.resumed(Step(4)), group.replace(frozenset({Step(4), Step(6)}))):
        with pytest.raises(WithdrawnError):
            await call
    for call in (group.drop(Step(6)), Group.on(control, "other").retire()):
        with pytest.raises(AbsentError):
            await call
    assert store.shared.objects == before


async def test_an_advance_is_decided_on_the_newest_record_alone(autojump_clock):
    store = FaultyStore()
    control, reclaimer = control_on(store), control_on(store)
    await run_of(control).add(Step(5))
    await reclaimer.refresh()
    await run_of(control).add(Step(3))
    assert not await reclaimer.advance(Advance(Step(5), Version(0), 0))
    await run_of(control).drop(Step(3))  # needed a moment ago, which counts as long as there is a grace
    assert not await reclaimer.advance(Advance(Step(5), Version(0), 0, grace_s=1.0))
    assert (await control_of(store)).first_live_step == 0
    assert await reclaimer.advance(Advance(Step(5), Version(0), 0))
    assert (await control_of(store)).first_live_step == 5


async def control_of(store):
    control = control_on(store)
    await control.refresh()
    return control


async def damaged(store):
    """A lake whose newest record, which has added checkpoint 7, is unreadable; and a process that has read it before."""
    await run_of(control_on(store)).add(Step(5))
    witness = control_on(store)
    await run_of(witness).add(Step(7))
    key = witness.key(1)
    store.shared.put(key, store.shared.objects[key][:-1])
    return witness


async def test_a_repair_does_not_undo_a_change_that_was_faster(autojump_clock):
    """Found by the model (mutant 10): the repair opened the log, learned of the new record, and went on after it."""
    store = Interrupted()
    witness = await damaged(store)
    store.meanwhile = lambda: run_of(witness).add(Step(9))
    with pytest.raises(RefusedError, match="another process"):
        await repair_control(store, LAKE, OriginStores(store, pytest.fail))
    assert (await control_of(store)).groups["run"].kept == (5, 7, 9)
    assert await repair_control(store, LAKE, OriginStores(store, pytest.fail)) is None


async def test_a_damaged_record_that_is_not_the_newest_any_more_stops_nobody(autojump_clock):
    """Another writer continues it between the look that finds no newer one and the end of that look."""
    store = FaultyStore()
    witness = await damaged(store)

    class Slow(FaultyStore):
        is_first = True

        async def get(self, key, **options):
            body = await super().get(key, **options)
            if key == witness.key(2) and self.is_first:
                assert body is None
                self.is_first = False
                await run_of(witness).add(Step(9))
            return body

    assert (await control_of(Slow(store.shared))).groups["run"].kept == (5, 7, 9)


async def test_a_repair_continues_the_record_before(autojump_clock):
    store = FaultyStore()
    await damaged(store)
    words = await repair_control(store, LAKE, OriginStores(store, pytest.fail))
    assert words is not None
    assert "record 1 is damaged; record 2 continues" in words
    control = await control_of(store)
    assert (control.number, control.groups["run"].kept) == (2, (5,))
    assert control.record.minima == ((2, 0), (3, 5))


async def grown(store, identity, until):
    async with AsyncProducer("memory://", producer_id="a", store=store, clock=TrioClock()) as producer:
        start = producer.position
        for number in range(start if isinstance(start, int) else 0, until):
            await producer.append([b"%d" % number], position=number + 1)
            await producer.flush()


async def test_a_repair_begins_where_a_snapshot_shows_that_steps_were_given_up(autojump_clock):
    """The snapshot after an advance names no segment below it: a step there cannot be promised, nor looked for."""
    with scaled(SEGMENT_STEPS=4, _VERSIONS_MAX=4):
        store = FaultyStore()
        identity = await create_lake(store, slices=1, clock=TrioClock())
        await grown(store, identity, 14)
        await Group.of(store, identity, "run", TrioClock()).add(Step(9), keep=1)
        await reclaim(store, identity, clock=TrioClock())
        await grown(store, identity, 17)
        control = Control(store, identity)
        await control.refresh()
        assert control.first_live_step == 9
        key = control.key(control.number)
        store.shared.put(key, store.shared.objects[key][:-1])
        await repair_control(store, identity, OriginStores(store, pytest.fail))
        repaired = Control(store, identity)
        await repaired.refresh()
        assert repaired.first_live_step == 9
        assert repaired.groups == control.groups


@scenario(small, on=grow)
async def test_a_reclaimer_before_a_hole_gives_up_nothing_that_was_promised_behind_it(world: World) -> None:
    reclaimer = Reclaimer(process(world, "old"), world.identity, clock=TrioClock())
    await reclaimer.run(dry_run=True)
    for name in ("x", "y", "z"):
        await register(world, name)
    for key in control_keys(world.shared, world.identity)[GROWN + 1 : -1]:
        world.shared.remove(key)
    assert (await reclaimer.run()).first_live_step == 0


@scenario(small, on=grow)
async def test_a_group_before_a_hole_records_behind_it(world: World) -> None:
    old = group(world, "run")
    await old.read()
    for name in ("x", "y", "z"):
        await register(world, name)
    world.shared.remove(control_keys(world.shared, world.identity)[GROWN + 1])
    await old.add(Step(NEED + 2))
    groups = await list_groups(process(world, "look"), world.identity)
    assert groups["run"].kept == (NEED, NEED + 2)
    assert groups.keys() == {"run", "x", "y", "z"}


@scenario(small, on=grow)
async def test_a_reader_that_slept_before_a_hole_learns_the_floor_behind_it(world: World) -> None:
    reader = await LogReader.open(process(world, "sleeper"), world.identity)
    await clean(world)
    await checkpoint(world, "run", NEED + 1)
    world.shared.remove(control_keys(world.shared, world.identity)[-2])
    await trio.sleep(3600)
    while not await reader.confirm():
        await reader.refresh()
    assert reader.first_live_step == NEED


@scenario(small, on=grow)
async def test_a_minimum_whose_record_is_gone_grows_old_too(world: World) -> None:
    await checkpoint(world, "run", NEED + 1)
    await checkpoint(world, "run", NEED + 2)
    world.shared.remove(control_keys(world.shared, world.identity)[-2])
    reclaimer = Reclaimer(process(world, "patient"), world.identity, clock=TrioClock(), grace_s=60)
    assert (await reclaimer.run()).first_live_step < NEED + 2
    await trio.sleep(3600)
    assert (await reclaimer.run()).first_live_step == NEED + 2


class Sleeper(ProcessStore):
    """Its next create under `control/` is sent only when `meanwhile` has come to its end."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def create(self, key: str, body: bytes) -> Put:
        if self.meanwhile is not None and "/control/" in key:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return await super().create(key, body)


@scenario(small, on=grow)
async def test_an_advance_that_lands_in_a_hole_deletes_nothing_that_is_needed_behind_it(world: World) -> None:
    """The reclaimer slept before its create, and two records that it had not seen were lost."""
    world.shared.watch = None
    sleeper = Sleeper(world.shared, actor="sleeper")

    async def others_join_and_their_records_vanish() -> None:
        for name in ("x", "y", "z"):
            await group(world, name).register()
        for key in control_keys(world.shared, world.identity)[GROWN + 1 : -1]:
            world.shared.remove(key)

    sleeper.meanwhile = others_join_and_their_records_vanish
    before = {key for key in world.shared.objects if "/data/" in key}
    await clean(world, sleeper)
    assert before <= world.shared.objects.keys()
    groups = await list_groups(process(world, "look"), world.identity)
    assert groups.keys() == {"run", "x", "y", "z"}


@scenario(small, on=grow)
async def test_a_group_change_that_fills_a_hole_is_lost_and_undoes_nothing(world: World) -> None:
    """The limit of the above: whether a newer record was decided on one's own cannot be seen."""
    world.shared.watch = None
    sleeper = Sleeper(world.shared, actor="sleeper")

    async def others_join_and_a_record_vanishes() -> None:
        for name in ("x", "y"):
            await group(world, name).register()
        world.shared.remove(control_keys(world.shared, world.identity)[GROWN + 1])

    sleeper.meanwhile = others_join_and_a_record_vanishes
    assert (await group(world, "run", sleeper).add(Step(NEED + 1))).kept == (NEED, NEED + 1)
    groups = await list_groups(process(world, "look"), world.identity)
    assert groups.keys() == {"run", "x", "y"}
    assert groups["run"].kept == (NEED,)
