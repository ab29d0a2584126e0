"""The group by which a fork holds its parent's steps: who registers it, who releases it, and who only says how."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from process_store import ProcessStore
from producer_world import World
from scenarios import scenario
from small_world import NEED, checkpoint, clean, group, process, small
from test_fork_kills import AROUND, Stores, holders, is_whole, reclaimed

from stepfs.errors import RefusedError
from stepfs.format.ids import Step
from stepfs.format.records import LakeIdentity
from stepfs.lake.control import Group
from stepfs.lake.fork import NO_END, Cut
from stepfs.lake.fork import group_name
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify.repair import repair_control
from stepfs.store.api import Put

COPY = "memory://the copy"


async def let_go(stores: Stores, child: LakeIdentity, step: int) -> None:
    """A trainer on the fork needs nothing below `step` any more, and the fork is reclaimed."""
    await Group.of(stores.child, child, "trainer", TrioClock()).add(Step(step), keep=1)
    origins = OriginStores(stores.child, lambda _: stores.parent)
    await reclaim(stores.child, child, origins=origins, clock=TrioClock())


@pytest.mark.logs("for the fork at memory://the fork, and nothing is released from here")
@pytest.mark.parametrize("step", [11, 12], ids=["moves on", "lets go"])
@scenario(small, on=reclaimed)
async def test_a_copy_of_a_fork_releases_nothing_in_the_parent_and_says_how(world: World, step: int, caplog) -> None:
    """A backup that was restored beside the fork; the parent's own reclaim then destroys what the fork shares."""
    place = ObjectMap()
    stores = Stores.of(world, place, "fork")
    child = await stores.fork(world.identity)
    copied = ObjectMap(objects=dict(place.objects), _keys=sorted(place.objects))
    copy = Stores.of(world, copied, "copy")
    copy.child.url = COPY
    await let_go(copy, child, step)
    assert (await group(world, f"fork:{child.lake_id}").read()).need == NEED  # type: ignore[union-attr]
    (record,) = caplog.records
    ends = "13 --keep 1" if step == 11 else "--retire"
    assert record.getMessage().endswith(f"stepfs checkpoint {stores.parent.url} --group fork:{child.lake_id} {ends}")
    await checkpoint(world, "run", 14)
    await clean(world)
    await is_whole(world, place, AROUND)
    await let_go(stores, child, step)
    assert await holders(world) == ({f"fork:{child.lake_id}"} if step == 11 else set())


@pytest.mark.logs("holds the steps of this fork no more")
@scenario(small, on=reclaimed)
async def test_a_fork_that_its_parent_holds_no_more_is_told_how_to_be_held_again(world: World, caplog):
    """Retired by hand, or registered in a record that was damaged and left out by a repair."""
    stores = Stores.of(world, ObjectMap(), "fork")
    child = await stores.fork(world.identity)
    origins = OriginStores(stores.child, lambda _: stores.parent)
    await reclaim(stores.child, child, origins=origins, clock=TrioClock())
    assert not caplog.records
    name = group_name(child.lake_id)
    await group(world, name).retire()
    await reclaim(stores.child, child, origins=origins, clock=TrioClock())
    (record,) = caplog.records
    assert record.getMessage().endswith(f"may reclaim them: stepfs checkpoint {stores.parent.url} --group {name} 9")
    await group(world, name).add(Step(9))
    await reclaim(stores.child, child, origins=origins, clock=TrioClock())
    assert len(caplog.records) == 1
    assert (await group(world, name).read()).need == 9  # type: ignore[union-attr]


class Slow(ProcessStore):
    """A forker that sleeps before its last look, until `meanwhile` has come to its end."""

    meanwhile: Callable[[], Awaitable[None]]

    async def create(self, key: str, body: bytes) -> Put:
        put = await super().create(key, body)
        if "/control/" in key and key.endswith("1"):
            await self.meanwhile()
        return put


@scenario(small, on=reclaimed)
async def test_a_fork_whose_group_is_retired_while_it_is_made_becomes_no_lake(world: World) -> None:
    """An operator took it for a killed one. It removes what it wrote."""
    place = ObjectMap()
    slow = Stores(process(world, "slow"), Slow(place, actor="slow there"))

    async def retires() -> None:
        (name,) = await holders(world)
        await group(world, name).retire()
        await checkpoint(world, "run", 14)
        await clean(world)

    slow.child.meanwhile = retires  # type: ignore[attr-defined]
    with pytest.raises(RefusedError, match="was retired before it was complete; fork again"):
        await slow.fork(world.identity)
    assert {key for key in place.objects if not key.startswith("probe/")} == set()
    assert await holders(world) == set()


@scenario(small, on=reclaimed)
async def test_a_name_on_record_makes_no_fork_delete_anything(world: World) -> None:
    """Who may only create under `control/` names a group as if a killed fork to here had another lake's id."""
    place = ObjectMap()
    victim = await Stores.of(world, place, "victim").fork(world.identity)
    mine = {key for key in place.objects if key.startswith(victim.lake_id)}
    await group(world, f"fork:{victim.lake_id}/data").register("memory://the fork")
    await group(world, "fork:").register("memory://the fork")
    with pytest.raises(RefusedError, match="is a lake already"):
        await Stores.of(world, place, "next").fork(world.identity)
    assert mine <= place.objects.keys()


@pytest.mark.parametrize("cut", [Cut(Step(9), Step(9), Step(9), Step(9)), Cut(Step(9), Step(9), NO_END)])
@scenario(small, on=reclaimed)
async def test_a_fork_that_shares_no_step_registers_no_group(world: World, cut: Cut) -> None:
    place = ObjectMap()
    stores = Stores.of(world, place, "fork")
    child = await stores.fork(world.identity, cut)
    assert await holders(world) == set()
    reader = await LogReader.open(stores.child, child)
    assert (reader.state.next_step, reader.first_live_step) == (NEED, NEED)
    await let_go(stores, child, NEED)


async def counts_what_is_live(stores: Stores, child: LakeIdentity) -> None:
    """What producers call live bytes (`max_live_bytes`) is what the live steps hold."""
    reader = await LogReader.open(stores.child, child)
    live = [await reader.entry(Step(step)) for step in range(reader.first_live_step, reader.state.next_step)]
    assert reader.state.total_bytes - reader.control.record.deleted_bytes == sum(e.tgb.payload_bytes for e in live)


@pytest.mark.parametrize("step", [NEED, 10, 11, 12])
@pytest.mark.parametrize("repaired", [False, True])
@scenario(small, on=reclaimed)
async def test_inherited_bytes_that_are_given_up_count_also_after_a_repair(world: World, step: int, repaired: bool):
    """Else a producer of the fork is held by `max_live_bytes` for ever, by bytes that no reclaim can free."""
    place = ObjectMap()
    stores = Stores.of(world, place, "fork")
    child = await stores.fork(world.identity)
    await let_go(stores, child, step)
    if repaired:
        newest = max(key for key in place.objects if key.startswith(f"{child.lake_id}/control/"))
        place.put(newest, b"")
        assert await repair_control(stores.child, child, OriginStores(stores.child, lambda _: stores.parent))
    await counts_what_is_live(stores, child)
