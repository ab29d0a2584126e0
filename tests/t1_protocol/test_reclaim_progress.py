"""The record of a reclaimer's progress comes from somewhere else: it deletes nothing that is live, and keeps nothing."""

from __future__ import annotations

from doubles.trio_clock import TrioClock
from producer_world import World, feed
from small_world import TOTALS, _copy, clean, grow, process, small

from stepfs.format.keys import reclaim_key
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


def test_progress_beyond_the_log_of_a_copied_lake_deletes_nothing_live() -> None:
    async def scenario(world: World) -> None:
        world.shared.put(reclaim_key(world.identity.lake_id), await of_a_future(world))
        world.shared.watch = world.ledger._watch
        await another_history(world)
        await clean(world)
        assert not world.ledger.broken, world.ledger.broken

    small(scenario, on=grow)


def test_a_reclaimer_under_which_the_lake_was_restored_deletes_nothing_live() -> None:
    async def scenario(world: World) -> None:
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

    small(scenario, on=grow)
