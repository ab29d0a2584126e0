"""A control record vanished that a process has not read yet: it finds those behind the hole and never fills it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from controlled import control_keys
from doubles.trio_clock import TrioClock
from lakework import list_groups
from process_store import ProcessStore
from producer_world import World
from scenarios import scenario
from small_world import GROWN, NEED, checkpoint, clean, group, grow, process, register, small

from stepfs.format.ids import Step
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim.run import Reclaimer
from stepfs.store.api import Put


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
