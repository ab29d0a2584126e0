"""Damaged and stray control records: who goes on, who refuses, and what a repair writes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from controlled import control_keys
from crc32c import crc32c
from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock
from fork_stores import AROUND, Stores, is_whole, reclaimed
from lakework import list_groups, reclaim
from ledger import Ledger
from process_store import ProcessStore
from producer_world import World, feed
from scenarios import scenario
from small_world import (
    NEED,
    STEPS,
    TOTALS,
    checkpoint,
    clean,
    flipped,
    group,
    grow,
    inside_everywhere,
    killed_everywhere,
    process,
    register,
    small,
)

from stepfs.errors import CorruptError, NewerFormatError, RefusedError
from stepfs.format.control import RECORD_BYTES_MAX
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import INTEGER_MAX, Step
from stepfs.format.keys import control_prefix, log_prefix, number_of, numbered
from stepfs.lake.control import Control, Group
from stepfs.lake.fork import Cut
from stepfs.lake.log.append import retire_producer, seal
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim.run import Reclaimer
from stepfs.lake.verify.data import advice, verify_lake
from stepfs.lake.verify.metadata import verify_metadata
from stepfs.lake.verify.repair import repair_control
from stepfs.store.api import Entry

LAST = STEPS - 1
NO_ORIGINS = OriginStores(ProcessStore(ObjectMap(), actor="none"), pytest.fail)
Spoil = Callable[[World, str], None]


def deleted(world: World, key: str) -> None:
    world.shared.remove(key)


def emptied(world: World, key: str) -> None:
    world.shared.put(key, b"")


def too_large(world: World, key: str) -> None:
    world.shared.put(key, bytes(RECORD_BYTES_MAX + 1))


def of_another_lake(world: World, key: str) -> None:
    world.shared.put(key, world.shared.objects[key].replace(world.identity.lake_id.encode(), b"0" * 32))


def of_a_newer_format(world: World, key: str) -> None:
    """Sound, but in format 2."""
    whole = world.shared.objects[key]
    header, body = whole[:7] + b"\2" + whole[8:12], whole[16:]
    world.shared.put(key, header + struct.pack("<I", crc32c(header + body)) + body)


async def aged(world: World) -> None:
    """Steps were given up across segments; groups came, changed and went, before that and after it."""
    await grow(world)
    await register(world, "late")
    await checkpoint(world, "late", NEED + 1)
    await clean(world)
    await checkpoint(world, "run", NEED + 2)
    await register(world, "gone")
    world.ledger.release("gone")
    await group(world, "gone").retire()
    await checkpoint(world, "late", NEED + 3)
    assert world.ledger.first_live_step == NEED


async def all_goes_on(world: World) -> None:
    """A new reader, a new group, a producer, a trainer and a reclaimer do what they do."""
    reader = await LogReader.open(process(world, "stranger"), world.identity)
    assert reader.state.digest == world.ledger.state.digest
    assert reader.first_live_step == world.ledger.first_live_step
    await register(world, "new")
    async with world.producer("a") as producer:
        await feed(producer, 12)
    for name in world.ledger.promises:
        await checkpoint(world, name, LAST)
    assert (await clean(world)).first_live_step == LAST
    assert not world.ledger.broken, world.ledger.broken
    await reader.poll()
    await reader.confirm()
    assert reader.first_live_step == LAST


NUMBERS = range(9)  # of `aged` and one advance more, all but the newest


@pytest.mark.parametrize("spoil", [flipped, deleted, emptied, too_large, of_another_lake, of_a_newer_format])
@pytest.mark.parametrize("number", NUMBERS)
@scenario(small, on=aged)
async def test_no_record_but_the_newest_is_needed(world: World, number: int, spoil: Spoil) -> None:
    follower = await LogReader.open(process(world, "follower"), world.identity)
    reclaimer = Reclaimer(process(world, "old"), world.identity, clock=TrioClock())
    await reclaimer.run()
    keys = control_keys(world.shared, world.identity)
    assert len(keys) == len(NUMBERS) + 1
    spoil(world, keys[number])
    await all_goes_on(world)
    await follower.poll()
    await follower.confirm()
    assert follower.first_live_step == LAST
    assert (await reclaimer.run()).first_live_step == LAST
    found = await verify_metadata(process(world, "verify"), world.identity)
    of_later = spoil is of_a_newer_format  # nobody reads it, so nothing is said of it
    assert [damage.key for damage in found] == ([] if of_later else [keys[number]])


@scenario(small, on=aged)
async def test_all_records_but_the_newest_may_be_gone(world: World) -> None:
    for key in control_keys(world.shared, world.identity)[:-1]:
        world.shared.remove(key)
    await all_goes_on(world)


async def is_refused(world: World) -> None:
    """With the command that mends it; nothing is written and nothing is deleted. Who knows the record goes on."""
    before = dict(world.shared.objects)
    for call in (
        group(world, "run").add(Step(LAST)),
        group(world, "new").register(),
        group(world, "run").retire(),
        clean(world),
        LogReader.open(process(world, "stranger"), world.identity),
    ):
        with pytest.raises(CorruptError, match=r"nothing is reclaimed and no group changes until .*verify .*--repair"):
            await call
    assert world.shared.objects == before


async def repaired(world: World) -> str:
    """By a new process; a second one finds nothing to do."""
    store = process(world, "operator")
    done = await repair_control(store, world.identity, NO_ORIGINS)
    assert done is not None
    assert await repair_control(store, world.identity, NO_ORIGINS) is None
    return done


@pytest.mark.parametrize("spoil", [flipped, emptied, too_large, of_another_lake])
@scenario(small, on=aged)
async def test_without_the_newest_record_nothing_changes_until_it_is_repaired(world: World, spoil: Spoil):
    follower = await LogReader.open(process(world, "follower"), world.identity)
    async with world.producer("d") as producer:
        await feed(producer, 1)
        await producer.flush()
        spoil(world, control_keys(world.shared, world.identity)[-1])
        await is_refused(world)
        await feed(producer, 2)
    while await follower.poll():
        pass
    assert follower.state.next_step == STEPS + 2, "who has read it before needs it no more"
    done = await repaired(world)
    assert f"control record {len(NUMBERS) - 1} is damaged" in done
    assert "steps from 9 on, groups late, run" in done
    assert (await group(world, "late").read()).kept == (NEED + 1,), "one change is lost, and that is said"  # type: ignore[union-attr]
    await checkpoint(world, "late", NEED + 3)
    await all_goes_on(world)


@scenario(small, on=aged)
async def test_who_has_not_read_the_damaged_record_keeps_what_it_has_until_the_repair(world: World) -> None:
    """New commits are not shown: nobody knows whether the floor has passed them."""
    follower = await LogReader.open(process(world, "follower"), world.identity)
    async with world.producer("d") as producer:
        await feed(producer, 1)
        await producer.flush()
        await checkpoint(world, "late", NEED + 4)
        flipped(world, control_keys(world.shared, world.identity)[-1])
        for _ in range(3):
            with pytest.raises(CorruptError, match=r"verify .*--repair"):
                await follower.poll()
            assert follower.state.next_step == STEPS
            world.ledger.check_entry("follower", await follower.entry(Step(NEED)))
        await repaired(world)
        await checkpoint(world, "late", NEED + 4)
        assert await follower.poll()
        assert follower.state.next_step == STEPS + 1
    await all_goes_on(world)


@scenario(small, on=aged)
async def test_a_newest_record_of_a_newer_stepfs_asks_for_an_upgrade_and_is_not_repaired(world: World):
    of_a_newer_format(world, control_keys(world.shared, world.identity)[-1])
    before = dict(world.shared.objects)
    for call in (
        group(world, "run").add(Step(LAST)),
        clean(world),
        LogReader.open(process(world, "stranger"), world.identity),
        repair_control(process(world, "operator"), world.identity, NO_ORIGINS),
    ):
        with pytest.raises(NewerFormatError, match="upgrade stepfs"):
            await call
    assert world.shared.objects == before


@scenario(small)
async def test_the_first_record_is_damaged_and_it_is_the_newest(world: World) -> None:
    await register(world, "run")
    flipped(world, control_keys(world.shared, world.identity)[-1])
    await is_refused(world)
    assert "groups none" in await repaired(world)
    await checkpoint(world, "run", NEED)
    assert await list_groups(process(world, "look"), world.identity) != {}


def test_an_advance_is_damaged_wherever_its_reclaimer_was_killed() -> None:
    """What may have been deleted is given up, everything else is live again, and all that is live is there."""
    firsts = set()

    async def after(world: World) -> None:
        await world.settle()
        world.shared.watch = None
        flipped(world, control_keys(world.shared, world.identity)[-1])
        await repaired(world)
        reader = await LogReader.open(process(world, "stranger"), world.identity)
        assert reader.first_live_step <= NEED
        assert not (await verify_lake(reader, origins=OriginStores(reader.store, pytest.fail))).errors
        firsts.add(reader.first_live_step)
        await group(world, "run").add(Step(LAST), keep=1)
        assert (await clean(world)).first_live_step == LAST

    assert killed_everywhere(grow, clean, after) > 50
    assert firsts >= {0, NEED}


async def repair(world: World) -> str:
    done = await repair_control(process(world, "operator"), world.identity, NO_ORIGINS)
    assert done is not None
    return done


@pytest.mark.parametrize("spoil", [flipped, deleted])
@scenario(small, on=grow)
async def test_an_advance_and_the_checkpoint_before_it_are_both_lost(world: World, spoil: Spoil) -> None:
    await clean(world)
    _, checkpointed, advanced = control_keys(world.shared, world.identity)
    world.ledger.promises.clear()
    spoil(world, checkpointed)
    flipped(world, advanced)
    done = await repair(world)
    reader = await LogReader.open(process(world, "stranger"), world.identity)
    assert reader.first_live_step == NEED, done
    assert not (await verify_lake(reader, origins=OriginStores(reader.store, pytest.fail))).errors
    assert (await list_groups(process(world, "look"), world.identity))["run"].need == NEED
    assert "1 to 2" in done


@scenario(small, on=grow)
async def test_a_sleeper_that_took_a_deleted_slot_does_not_lower_the_floor_for_others(world: World) -> None:
    """Slots between its slot and the log are free: another sleeper's create there would count as committed."""
    first = numbered(log_prefix(world.identity.lake_id), 2)
    sleeper = world.shared.objects[first]
    await clean(world)
    floor = world.ledger.control.floor
    assert floor > 3
    world.shared.put(first, sleeper)
    flipped(world, control_keys(world.shared, world.identity)[-1])
    await repair(world)
    control = Control(process(world, "look"), world.identity)
    await control.refresh()
    assert control.floor == floor


@scenario(small, on=grow)
async def test_a_step_that_is_lost_beside_two_records_does_not_take_those_before_it(world: World) -> None:
    await clean(world)
    _, checkpointed, advanced = control_keys(world.shared, world.identity)
    world.ledger.promises.clear()
    flipped(world, checkpointed)
    flipped(world, advanced)
    world.shared.remove(world.ledger.steps[STEPS - 1].tgb.key)
    await repair(world)
    reader = await LogReader.open(process(world, "stranger"), world.identity)
    assert reader.first_live_step == NEED


async def forked(world: World, *cut: Cut) -> tuple[ObjectMap, Stores, LakeIdentity, Group]:
    """A fork: its objects, its stores, its identity, and the group of a trainer on it."""
    place = ObjectMap()
    stores = Stores.of(world, place, "forker")
    identity = await stores.fork(world.identity, *cut)
    return place, stores, identity, Group.of(stores.child, identity, "trainer", TrioClock())


def newest_keys(place: ObjectMap, lake_id: str, count: int) -> list[str]:
    return [key for key in sorted(place.objects) if key.startswith(f"{lake_id}/control/")][-count:]


def spoil_newest(place: ObjectMap, lake_id: str, count: int) -> None:
    for key in newest_keys(place, lake_id, count):
        place.put(key, b"")


def of_parent(stores: Stores) -> OriginStores:
    return OriginStores(stores.child, lambda _url: stores.parent)


@scenario(small, on=reclaimed)
async def test_a_fork_promises_nothing_that_it_has_released_in_its_parent(world: World) -> None:
    place, stores, identity, trainer = await forked(world)
    await trainer.add(Step(NEED + 2))
    await reclaim(stores.child, identity, origins=of_parent(stores), clock=TrioClock())
    spoil_newest(place, identity.lake_id, 1)
    assert await repair_control(stores.child, identity, of_parent(stores)) is not None
    reader = await LogReader.open(stores.child, identity)
    assert reader.first_live_step == NEED + 2


@scenario(small, on=reclaimed)
async def test_a_fork_that_lost_two_records_does_not_promise_its_own_steps_that_are_gone(world: World):
    place, stores, identity, trainer = await forked(world, Cut(Step(10), Step(10), Step(11)))
    end = (await LogReader.open(stores.child, identity)).state.next_step
    inside = World(place, identity, Ledger(place, identity, 4))
    last = world.ledger.steps[STEPS - 1].producer_id  # its step and those of the fork share a segment
    async with inside.producer(last) as producer:
        await feed(producer, TOTALS[last] + 6)
    await trainer.add(Step(end + 2))
    await reclaim(stores.child, identity, origins=of_parent(stores), clock=TrioClock())
    spoil_newest(place, identity.lake_id, 2)
    await repair_control(stores.child, identity, of_parent(stores))
    reader = await LogReader.open(stores.child, identity)
    assert reader.first_live_step == end + 2


@scenario(small, on=reclaimed)
async def test_another_lake_in_the_place_of_the_parent_does_not_say_what_a_fork_has_released(world: World):
    place, stores, identity, trainer = await forked(world)
    await trainer.add(Step(NEED + 2))
    await trainer.add(Step(NEED + 3))
    spoil_newest(place, identity.lake_id, 1)
    other = await World.create()
    stranger = OriginStores(stores.child, lambda _url: process(other, "stranger"))
    await repair_control(stores.child, identity, stranger)
    assert (await LogReader.open(stores.child, identity)).first_live_step == NEED


@pytest.mark.parametrize("spoil", [flipped, deleted])
@scenario(small, on=reclaimed)
async def test_a_fork_whose_newest_record_is_lost_shows_only_its_own_steps(world: World, spoil: Spoil):
    place, stores, identity, _ = await forked(world)
    (key,) = newest_keys(place, identity.lake_id, 1)
    if spoil is deleted:
        place.remove(key)
    else:
        body = bytearray(place.objects[key])
        body[len(body) // 2] ^= 4
        place.put(key, bytes(body))
        assert await repair_control(stores.child, identity, of_parent(stores)) is not None
    await is_whole(world, place, AROUND)


@scenario(small, on=grow)
async def test_who_knew_the_damaged_record_goes_on_after_the_repair(world: World) -> None:
    reclaimer = Reclaimer(process(world, "old"), world.identity, clock=TrioClock())
    follower = await LogReader.open(process(world, "follower"), world.identity)
    old = group(world, "run")
    before = dict(world.shared.objects)
    await reclaimer.run()
    await follower.confirm()
    await old.read()
    for key, body in before.items():  # as if the reclaimer had not deleted anything yet
        world.shared.put(key, body)
    flipped(world, control_keys(world.shared, world.identity)[-1])
    await repair(world)
    await follower.poll()
    assert await follower.confirm()
    assert follower.first_live_step == 0
    await old.add(Step(NEED + 1), keep=1)
    world.ledger.broken.clear()
    assert (await reclaimer.run()).first_live_step == NEED + 1


@scenario(small, on=grow)
async def test_a_producer_that_has_not_read_the_damaged_record_fails_and_loses_nothing(world: World) -> None:
    """Its create is in the log; whether that counts shows after the repair."""
    with pytest.raises(CorruptError, match=r"verify .*--repair"):
        async with world.producer("d") as producer:
            await register(world, "late")
            flipped(world, control_keys(world.shared, world.identity)[-1])
            await feed(producer, 3)
    await repair(world)
    async with world.producer("d") as producer:
        await feed(producer, 5)
    world.check(d=5, **TOTALS)


@pytest.mark.logs("is unreadable, using an older one")
@scenario(small, on=grow)
async def test_a_log_that_is_damaged_too_does_not_prevent_the_repair(world: World) -> None:
    async with world.producer("a") as producer:
        await feed(producer, 12)
    flipped(world, control_keys(world.shared, world.identity)[-1])
    flipped(world, numbered(log_prefix(world.identity.lake_id), world.ledger.state.version))
    await repair(world)
    with pytest.raises(CorruptError, match="log/"):
        await LogReader.open(process(world, "stranger"), world.identity)
    reader = await LogReader.open(process(world, "stranger"), world.identity, until_damage=True)
    assert reader.damage is not None
    await register(world, "more")


@scenario(small, on=grow)
async def test_of_two_repairs_at_once_one_says_that_the_other_was_faster(world: World) -> None:
    await clean(world)
    flipped(world, control_keys(world.shared, world.identity)[-1])
    slow = process(world, "slow")
    listed = slow.list

    async def overtaken(prefix: str, **options: Any) -> list[Entry]:
        if prefix == log_prefix(world.identity.lake_id) and not done:
            done.append(await repair(world))
        return await listed(prefix, **options)

    done: list[str] = []
    slow.list = overtaken  # type: ignore[method-assign,assignment]
    with pytest.raises(RefusedError, match="another process wrote"):
        await repair_control(slow, world.identity, NO_ORIGINS)
    assert done


@pytest.mark.parametrize("damaged", ["a checkpoint", "an advance"])
def test_a_trainer_a_producer_and_a_reclaimer_inside_any_await_of_a_repair(damaged: str) -> None:
    """Whoever takes the next slot, what is on record in the end is there, and the trainer's checkpoint is on record."""
    trainers: dict[int, Group] = {}
    outcomes: set[object] = set()

    async def repairs(world: World, store: ProcessStore) -> None:
        if damaged == "an advance":
            await clean(world)
        trainer = trainers[id(world)] = group(world, "run")
        await trainer.read()
        world.ledger.promises["run"] = LAST
        flipped(world, control_keys(world.shared, world.identity)[-1])
        try:
            outcomes.add(await repair_control(store, world.identity, NO_ORIGINS) and "repaired")
        except RefusedError as error:
            outcomes.add("another process wrote" in str(error) or str(error))

    async def all_go_on(world: World) -> None:
        await trainers[id(world)].add(Step(LAST), keep=1)
        async with world.producer("d") as producer:
            await feed(producer, 6)
        await clean(world)

    async def is_whole(world: World) -> None:
        reader = await LogReader.open(process(world, "stranger"), world.identity)
        assert reader.first_live_step == LAST
        assert not (await verify_lake(reader, origins=OriginStores(reader.store, pytest.fail))).errors
        record = await group(world, "run").read()
        assert record is not None
        assert record.kept == (LAST,)
        assert (await clean(world)).first_live_step == LAST
        world.check(d=6, **TOTALS)

    assert inside_everywhere(grow, repairs, all_go_on, is_whole) > 20
    assert {"repaired", True} <= outcomes <= {"repaired", True, None}, "True: it lost, and says so; None: it is sound"


def test_no_repair_loses_the_one_record_that_comes_inside_it() -> None:
    """A trainer takes the next slot between the look that found the damage and the search for what can be read."""
    trainers: dict[int, Group] = {}

    async def repairs(world: World, store: ProcessStore) -> None:
        trainer = trainers[id(world)] = group(world, "run")
        await trainer.read()
        world.ledger.promises["run"] = LAST
        flipped(world, control_keys(world.shared, world.identity)[-1])
        with suppress(RefusedError):
            await repair_control(store, world.identity, NO_ORIGINS)

    async def records(world: World) -> None:
        await trainers[id(world)].add(Step(LAST), keep=1)

    async def is_on_record(world: World) -> None:
        record = await group(world, "run").read()
        assert record is not None
        assert record.kept == (LAST,)

    assert inside_everywhere(grow, repairs, records, is_on_record) > 20


FAR = 99_999_999


@pytest.mark.parametrize("number", [INTEGER_MAX + 1, 10**20 - 1])
def test_a_number_that_no_lake_reaches_is_no_slot(number: int) -> None:
    assert number_of("a/", numbered("a/", INTEGER_MAX)) == INTEGER_MAX
    assert number_of("a/", numbered("a/", number)) is None


async def _stray(world: World, number: int = FAR) -> str:
    key = numbered(control_prefix(world.identity.lake_id), number)
    world.shared.put(key, b"not a record")
    return key


@pytest.mark.logs("is no control record, and no stepfs wrote it")
@pytest.mark.parametrize("number", [FAR, INTEGER_MAX, 10**19])
@scenario(small, on=aged)
async def test_one_object_with_a_far_number_stops_nobody(world: World, number: int) -> None:
    follower = await LogReader.open(process(world, "follower"), world.identity)
    world.shared.watch, watch = None, world.shared.watch
    key = await _stray(world, number)
    world.shared.watch = watch
    await all_goes_on(world)
    await follower.poll()
    await follower.confirm()
    assert follower.first_live_step == LAST
    store = process(world, "operator")
    assert await repair_control(store, world.identity, NO_ORIGINS) is None
    damages = await verify_metadata(store, world.identity)
    (damage,) = damages
    assert damage.key == key
    told = advice(
        "URL", world.identity.lake_id, damages, opens=True, has_beginning=True, live=range(1), control_reads=True
    )
    sound = "only the newest control record is read, and it is sound: nothing to do"
    assert told == [f"delete URL/{key}" if number <= INTEGER_MAX else sound]
    assert store.counts.requests < 200


@pytest.mark.logs("is no control record, and no stepfs wrote it")
@scenario(small, on=aged)
async def test_of_a_stray_object_and_a_damaged_newest_record_only_the_record_is_repaired(world: World) -> None:
    newest = control_keys(world.shared, world.identity)[-1]
    flipped(world, newest)
    world.shared.watch = None
    await _stray(world)
    store = process(world, "operator")
    with pytest.raises(CorruptError, match=f"{newest}.*verify .*--repair"):
        await group(world, "run").add(Step(LAST))
    done = await repair_control(store, world.identity, NO_ORIGINS)
    assert done is not None
    assert "record 9 continues the one before" in done
    assert store.counts.requests < 200
    await group(world, "run").add(Step(LAST))


@pytest.mark.logs("goes on from the record before")
@scenario(small, on=aged)
async def test_a_new_reader_goes_on_from_the_record_before_a_damaged_one_and_no_writer_does(world: World) -> None:
    keys = control_keys(world.shared, world.identity)
    for key in keys[-2:]:
        flipped(world, key)
    before = dict(world.shared.objects)
    reader = await LogReader.open(process(world, "ls"), world.identity, reads_only=True)
    worker = await LogReader.continued(process(world, "worker"), world.identity, reader.state)
    for one in (reader, worker):
        assert (one.state.digest, one.first_live_step) == (world.ledger.state.digest, world.ledger.first_live_step)
        for step in range(one.first_live_step, STEPS):
            world.ledger.check_entry("reader", await one.entry(Step(step)))
    for call in (
        group(world, "run").add(Step(LAST)),
        clean(world),
        seal(await LogReader.open(process(world, "s"), world.identity, reads_only=True), TrioClock()),
        retire_producer(await LogReader.open(process(world, "s"), world.identity, reads_only=True), "a", TrioClock()),
        world.producer("a").__aenter__(),
    ):
        with pytest.raises(CorruptError, match=r"verify .*--repair"):
            await call
    assert world.shared.objects == before
    assert not world.ledger.broken, world.ledger.broken


@scenario(small, on=aged)
async def test_a_far_object_under_log_is_named_with_what_to_do(world: World) -> None:
    """A hole that long may be a restore that is not complete: a writer must not fill it."""
    key = numbered(log_prefix(world.identity.lake_id), FAR)
    world.shared.watch = None
    world.shared.put(key, b"not a commit")
    with pytest.raises(CorruptError, match=f"or if no stepfs wrote it, delete {key}"):
        await LogReader.open(process(world, "reader"), world.identity)
