"""One control record is damaged or gone. Only the newest is ever read; without it nothing is given up, and it is mended."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from controlled import control_keys
from crc32c import crc32c
from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock
from lakework import list_groups
from process_store import ProcessStore
from producer_world import World, feed
from scenarios import scenario
from small_world import NEED, STEPS, checkpoint, clean, group, grow, killed_everywhere, process, register, small

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.control import RECORD_BYTES_MAX
from stepfs.format.ids import Step
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim.run import Reclaimer
from stepfs.lake.verify.lake import verify_lake
from stepfs.lake.verify.metadata import verify_metadata
from stepfs.lake.verify.repair import repair_control

LAST = STEPS - 1
NO_ORIGINS = OriginStores(ProcessStore(ObjectMap(), actor="none"), pytest.fail)
Spoil = Callable[[World, str], None]


def flipped(world: World, key: str) -> None:
    body = bytearray(world.shared.objects[key])
    body[len(body) // 2] ^= 4
    world.shared.put(key, bytes(body))


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
    (damage,) = await verify_metadata(process(world, "verify"), world.identity)
    assert damage.key == keys[number]


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
