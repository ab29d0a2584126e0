"""A control record vanished that a process has not read yet: it finds those behind the hole and never fills it."""

from __future__ import annotations

import trio
from controlled import control_keys
from doubles.trio_clock import TrioClock
from producer_world import World
from small_world import GROWN, NEED, checkpoint, clean, group, grow, process, register, small

from stepfs.format.ids import Step
from stepfs.lake.control import list_groups
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim.run import Reclaimer


def test_a_reclaimer_before_a_hole_gives_up_nothing_that_was_promised_behind_it() -> None:
    async def scenario(world: World) -> None:
        reclaimer = Reclaimer(process(world, "old"), world.identity, clock=TrioClock())
        await reclaimer.run(dry_run=True)
        for name in ("x", "y", "z"):
            await register(world, name)
        for key in control_keys(world.shared, world.identity)[GROWN + 1 : -1]:
            world.shared.remove(key)
        assert (await reclaimer.run()).first_live_step == 0

    small(scenario, on=grow)


def test_a_group_before_a_hole_records_behind_it() -> None:
    async def scenario(world: World) -> None:
        old = group(world, "run")
        await old.read()
        for name in ("x", "y", "z"):
            await register(world, name)
        world.shared.remove(control_keys(world.shared, world.identity)[GROWN + 1])
        await old.add(Step(NEED + 2))
        groups = await list_groups(process(world, "look"), world.identity)
        assert groups["run"].kept == (NEED, NEED + 2)
        assert groups.keys() == {"run", "x", "y", "z"}

    small(scenario, on=grow)


def test_a_reader_that_slept_before_a_hole_learns_the_floor_behind_it() -> None:
    async def scenario(world: World) -> None:
        reader = await LogReader.open(process(world, "sleeper"), world.identity)
        await clean(world)
        await checkpoint(world, "run", NEED + 1)
        world.shared.remove(control_keys(world.shared, world.identity)[-2])
        await trio.sleep(3600)
        while not await reader.confirm():
            await reader.refresh()
        assert reader.first_live_step == NEED

    small(scenario, on=grow)


def test_a_minimum_whose_record_is_gone_grows_old_too() -> None:
    async def scenario(world: World) -> None:
        await checkpoint(world, "run", NEED + 1)
        await checkpoint(world, "run", NEED + 2)
        world.shared.remove(control_keys(world.shared, world.identity)[-2])
        reclaimer = Reclaimer(process(world, "patient"), world.identity, clock=TrioClock(), grace_s=60)
        assert (await reclaimer.run()).first_live_step < NEED + 2
        await trio.sleep(3600)
        assert (await reclaimer.run()).first_live_step == NEED + 2

    small(scenario, on=grow)
