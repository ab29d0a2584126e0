"""How much a control record holds: many groups, names that differ by case, checkpoints beyond everything."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
from controlled import control_keys
from deterministic import scaled
from doubles.trio_clock import TrioClock
from lakework import list_groups
from producer_world import World
from scenarios import scenario
from small_world import NEED, STEPS, clean, group, grow, process, small

from stepfs.errors import RefusedError
from stepfs.format.control import RECORD_BYTES_MAX, RESERVED_BYTES
from stepfs.format.ids import INTEGER_MAX, Step
from stepfs.lake.reclaim.run import Reclaimer

LAST = STEPS - 1


@scenario(small, on=grow)
async def test_200_groups_fit_and_what_would_not_is_refused_with_advice(world: World) -> None:
    world.shared.watch = None
    for number in range(200):
        await group(world, f"group-{number:03d}-{'x' * 40}").add(Step(NEED))
    assert len(await list_groups(process(world, "look"), world.identity)) == 201
    assert (await clean(world)).first_live_step == NEED
    newest = control_keys(world.shared, world.identity)[-1]
    assert len(world.shared.objects[newest]) < RECORD_BYTES_MAX // 16
    many = frozenset(map(Step, range(1 << 40, (1 << 40) + 4096)))
    with pytest.raises(RefusedError, match=r"keep fewer .*--keep K.* or retire groups"):
        for number in range(200):
            await group(world, f"group-{number:03d}-{'x' * 40}").replace(many)
    assert number > 10
    await group(world, "group-000-" + "x" * 40).retire()
    await group(world, "run").add(Step(LAST), keep=1)


@scenario(small, on=grow)
async def test_groups_that_differ_by_case_are_two(world: World) -> None:
    await group(world, "RUN").add(Step(NEED + 1), keep=1)
    groups = await list_groups(process(world, "look"), world.identity)
    assert {name: record.need for name, record in groups.items()} == {"run": NEED, "RUN": NEED + 1}
    world.ledger.release("run")
    await group(world, "run").retire()
    assert (await clean(world)).first_live_step == NEED + 1


@pytest.mark.parametrize("step", [STEPS + 1, INTEGER_MAX])
@scenario(small, on=grow)
async def test_a_checkpoint_beyond_everything_stops_reclaim_until_it_is_corrected(world: World, step):
    world.shared.watch = None
    await group(world, "run").replace(frozenset({Step(step)}))
    before = dict(world.shared.objects)
    with pytest.raises(RefusedError, match="another lake"):
        await clean(world)
    assert world.shared.objects == before
    await group(world, "run").replace(frozenset({Step(LAST)}))
    assert (await clean(world)).first_live_step == LAST


@pytest.mark.parametrize("live", [1, 0])
@scenario(small, on=grow)
async def test_under_grace_too_no_step_is_given_up_that_is_not_committed_yet(world: World, live: int) -> None:
    """Two checkpoints in a wrong unit: within the grace the first still counts, and it is beyond the lake, too."""
    world.shared.watch = None
    await group(world, "run").add(Step(STEPS - live), keep=1)
    assert (await clean(world)).first_live_step == STEPS - live
    await group(world, "run").add(Step(1000), keep=1)
    await trio.sleep(7200)
    await group(world, "run").add(Step(2000), keep=1)
    before = dict(world.shared.objects)
    patient = Reclaimer(process(world, "patient"), world.identity, clock=TrioClock(), grace_s=3600.0)
    with pytest.raises(RefusedError, match="another lake"):
        await patient.run()
    assert world.shared.objects == before


@scenario(small, on=grow)
async def test_an_advance_finds_room_in_the_fullest_record(world: World) -> None:
    """Whatever groups record until they are refused: what gives steps or checkpoints up may always be written."""
    world.shared.watch = None
    await group(world, "run").add(Step(LAST))
    many, bytes_max = sorted(range(1 << 40, (1 << 40) + 512)), RECORD_BYTES_MAX // 8
    with scaled(RECORD_BYTES_MAX=bytes_max):
        for number in range(200):
            try:
                await group(world, f"g{number}").replace(frozenset(map(Step, many)))
            except RefusedError:
                break
        for power in range(9, -1, -1):  # as full as it gets
            with suppress(RefusedError):
                held = len((await group(world, "last").register()).kept)
                await group(world, "last").replace(frozenset(map(Step, many[: held + (1 << power)])))
        newest = control_keys(world.shared, world.identity)[-1]
        assert bytes_max - len(world.shared.objects[newest]) < RESERVED_BYTES + 32
        for step in range(NEED - 2, NEED + 2):
            await group(world, "last").drop(Step(many[step]))
        await group(world, "run").drop(Step(NEED))
        assert (await clean(world)).first_live_step == LAST
        await group(world, "g0").retire()
        await group(world, "run").add(Step(LAST + 1))
