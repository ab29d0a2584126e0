"""`verify --repair` beside a trainer that knew the damaged record, reclaimers and producers: inside any of its awaits."""

from __future__ import annotations

import pytest
from controlled import control_keys
from process_store import ProcessStore
from producer_world import World, feed
from small_world import STEPS, TOTALS, clean, group, grow, inside_everywhere, process
from test_control_damage import NO_ORIGINS, flipped

from stepfs.errors import RefusedError
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify.lake import verify_lake
from stepfs.lake.verify.repair import repair_control

LAST = STEPS - 1


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
