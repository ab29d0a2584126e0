"""`verify --repair` where more is lost than one change: a second record, a fork's only one, a process that knew it."""

from __future__ import annotations

from typing import Any

import pytest
from controlled import control_keys
from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock
from lakework import list_groups, reclaim
from ledger import Ledger
from producer_world import World, feed
from scenarios import scenario
from small_world import NEED, STEPS, TOTALS, clean, group, grow, process, register, small
from test_control_damage import NO_ORIGINS, Spoil, deleted, flipped
from test_fork_kills import AROUND, Stores, is_whole, reclaimed

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.ids import Step
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.records import LakeIdentity
from stepfs.lake.control import Control, Group
from stepfs.lake.fork import Cut
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim.run import Reclaimer
from stepfs.lake.verify.lake import verify_lake
from stepfs.lake.verify.repair import repair_control
from stepfs.store.api import Entry


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
