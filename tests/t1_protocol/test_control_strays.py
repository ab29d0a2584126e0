"""What nobody of stepfs wrote under `control/`, and what a reader does when the newest record is damaged."""

from __future__ import annotations

import pytest
from controlled import control_keys
from doubles.trio_clock import TrioClock
from producer_world import World
from scenarios import scenario
from small_world import STEPS, clean, group, process, small
from test_control_damage import LAST, NO_ORIGINS, aged, all_goes_on, flipped

from stepfs.errors import CorruptError
from stepfs.format.ids import INTEGER_MAX, Step
from stepfs.format.keys import control_prefix, log_prefix, number_of, numbered
from stepfs.lake.log.append import retire_producer, seal
from stepfs.lake.log.reader import LogReader
from stepfs.lake.verify.lake import advice
from stepfs.lake.verify.metadata import verify_metadata
from stepfs.lake.verify.repair import repair_control

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
    with pytest.raises(CorruptError, match=f"or delete {key} if no stepfs wrote it"):
        await LogReader.open(process(world, "reader"), world.identity)
