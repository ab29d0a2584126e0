"""A reclaimer that knows commits which its lake has lost deletes nothing that is live."""

from __future__ import annotations

from doubles.trio_clock import TrioClock
from producer_world import World, feed
from scenarios import scenario
from small_world import TOTALS, grow, process, small

from stepfs.lake.reclaim.run import Reclaimer


async def another_history(world: World) -> None:
    for until in (3, 3):
        async with world.producer("a") as producer:
            await feed(producer, TOTALS["a"] + until)


@scenario(small, on=grow)
async def test_a_reclaimer_under_which_the_lake_was_restored_deletes_nothing_live(world: World) -> None:
    reclaimer = Reclaimer(process(world, "old"), world.identity, clock=TrioClock())
    before, ledger = dict(world.shared.objects), world.ledger.onto(world.shared)
    world.shared.watch = world.ledger._watch
    async with world.producer("b") as producer:
        await feed(producer, TOTALS["b"] + 5)
    await reclaimer.run(dry_run=True)
    await reclaimer.run(dry_run=False)
    for key in set(world.shared.objects) - set(before):
        world.shared.remove(key)
    for key, body in before.items():
        world.shared.put(key, body)
    world.ledger = ledger
    world.shared.watch = ledger._watch
    await another_history(world)
    await reclaimer.run()
    assert not ledger.broken, ledger.broken
