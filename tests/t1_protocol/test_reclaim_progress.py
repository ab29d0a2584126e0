"""The record of a reclaimer's progress comes from somewhere else: it deletes nothing that is live, and keeps nothing."""

from __future__ import annotations

from doubles.trio_clock import TrioClock
from producer_world import World, feed
from scenarios import scenario
from small_world import TOTALS, _copy, checkpoint, clean, grow, process, register, small

from stepfs.format.keys import number_of, reclaim_key, snapshot_prefix
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import write_snapshot
from stepfs.lake.reclaim.progress import read_progress
from stepfs.lake.reclaim.run import Reclaimer


async def of_a_future(world: World) -> bytes:
    """What a reclaimer would write after commits that this copy of the lake has not got."""
    future = _copy(world)
    async with future.producer("b") as producer:
        await feed(producer, TOTALS["b"] + 5)
    await clean(future)
    return future.shared.objects[reclaim_key(world.identity.lake_id)]


async def another_history(world: World) -> None:
    for until in (3, 3):
        async with world.producer("a") as producer:
            await feed(producer, TOTALS["a"] + until)


@scenario(small, on=grow)
async def test_progress_beyond_the_log_of_a_copied_lake_deletes_nothing_live(world: World) -> None:
    world.shared.put(reclaim_key(world.identity.lake_id), await of_a_future(world))
    world.shared.watch = world.ledger._watch
    await another_history(world)
    await clean(world)
    assert not world.ledger.broken, world.ledger.broken


@scenario(small)
async def test_an_advance_does_not_rest_on_progress_beyond_the_log(world: World) -> None:
    """The control record of that future's advance was not copied either, so all but the advance seems to be done."""
    await register(world, "run")
    async with world.producer("a") as producer:
        await feed(producer, 2)
    await checkpoint(world, "run", 2)
    future = _copy(world)
    for until in (3, 3):
        async with future.producer("a") as producer:
            await feed(producer, until)
        log = await LogReader.open(process(future, "writer"), future.identity)
        await write_snapshot(log.store, log.identity, log.state, log.segments, log.control)
    await clean(future)
    key, prefix = reclaim_key(world.identity.lake_id), snapshot_prefix(world.identity.lake_id)
    world.shared.put(key, future.shared.objects[key])
    assert (await clean(world)).first_live_step == 2
    snapshots = [number_of(prefix, key) for key in world.shared.objects if key.startswith(prefix)]
    assert max(number for number in snapshots if number is not None) <= world.ledger.state.version


@scenario(small, on=grow)
async def test_a_reclaimer_under_which_the_lake_was_restored_deletes_nothing_live(world: World) -> None:
    reclaimer = Reclaimer(process(world, "old"), world.identity, clock=TrioClock())
    before, ledger = dict(world.shared.objects), world.ledger.onto(world.shared)
    world.shared.watch = world.ledger._watch
    async with world.producer("b") as producer:
        await feed(producer, TOTALS["b"] + 5)
    await reclaimer.run(dry_run=True)
    await reclaimer.run(dry_run=False)
    assert await read_progress(process(world, "look"), world.identity) is not None
    for key in set(world.shared.objects) - set(before):
        world.shared.remove(key)
    for key, body in before.items():
        world.shared.put(key, body)
    world.ledger = ledger
    world.shared.watch = ledger._watch
    await another_history(world)
    await reclaimer.run()
    assert not ledger.broken, ledger.broken


@scenario(small)
async def test_a_lake_without_any_group_is_idle_too(world: World) -> None:
    async with world.producer("a") as producer:
        await feed(producer, 2)
    key = reclaim_key(world.identity.lake_id)
    await clean(world)
    noted = world.shared.objects[key]
    await clean(world)
    assert world.shared.objects[key] is noted
