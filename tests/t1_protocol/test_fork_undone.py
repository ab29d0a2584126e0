"""A fork that another undoes while it still runs: it becomes no lake, and no fork that may become one loses an object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from doubles.faulty_store import Event, ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from process_store import ProcessStore
from producer_world import World
from scenarios import scenario
from small_world import group, process, small
from test_fork_kills import Stores, forked_until, holders, reclaimed, unfinished

from stepfs.errors import RefusedError, StoreUnreachableError
from stepfs.format.ids import Step
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.unfinished_fork import group_name
from stepfs.store.api import Put


class Overtaken(ProcessStore):
    """A forker that sleeps before its last look, until `meanwhile` has come to its end."""

    meanwhile: Callable[[], Awaitable[None]]

    async def create(self, key: str, body: bytes) -> Put:
        put = await super().create(key, body)
        if "/control/" in key and key.endswith("1"):
            await self.meanwhile()
        return put


@scenario(small, on=reclaimed)
async def test_an_undone_fork_becomes_no_lake_though_its_place_is_free_again(world: World) -> None:
    """Another fork to the same place undid it, and was dropped itself."""
    place = ObjectMap()
    slow = Stores(process(world, "slow"), Overtaken(place, actor="slow there"))
    slow.child.url = "memory://the fork"

    async def other_comes_and_goes() -> None:
        made = await Stores.of(world, place, "other").fork(world.identity)
        assert await holders(world) == {group_name(made.lake_id)}
        for key in list(place.objects):
            place.remove(key)

    slow.child.meanwhile = other_comes_and_goes  # type: ignore[attr-defined]
    with pytest.raises(RefusedError, match="another process undid this fork"):
        await slow.fork(world.identity)
    assert {key for key in place.objects if not key.startswith("probe/")} == set()


@scenario(small, on=reclaimed)
async def test_an_undo_deletes_nothing_of_a_fork_that_still_holds_its_parent(world: World) -> None:
    """Else a kill between the two would leave a fork that may be finished over deleted objects."""
    place = ObjectMap()
    assert not await forked_until(world, place, "victim", 60)
    (undone,) = await unfinished(world)
    deleted = 0

    def watch(event: Event) -> None:
        nonlocal deleted
        if event.verb == "delete" and undone.removeprefix("fork:") in event.keys[0]:
            deleted += len(event.keys)
            assert undone not in world.ledger.control.groups

    place.watch = watch
    await Stores.of(world, place, "next").fork(world.identity)
    assert deleted > 0


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


class Killed(ProcessStore):
    """A forker that another undoes when it has written its log, and that is killed two objects later."""

    meanwhile: Callable[[], Awaitable[None]]

    async def create(self, key: str, body: bytes) -> Put:
        put = await super().create(key, body)
        if "/log/" in key:
            await self.meanwhile()
        self.dead = "/control/" in key
        return put


@scenario(small, on=reclaimed)
async def test_a_fork_that_is_killed_after_its_undo_leaves_objects_that_belong_to_no_lake(world: World):
    """They lie under an id of their own: they disturb nobody, and hold nothing."""
    place = ObjectMap()
    slow = Stores(process(world, "slow"), Killed(place, actor="slow there"))
    slow.child.url = "memory://the fork"
    made = []

    async def other_comes() -> None:
        made.append(await Stores.of(world, place, "other").fork(world.identity))

    slow.child.meanwhile = other_comes  # type: ignore[attr-defined]
    with pytest.raises(StoreUnreachableError, match="was killed"):
        await slow.fork(world.identity)
    (identity,) = made
    assert await holders(world) == {group_name(identity.lake_id)}
    left = [key for key in place.objects if key.split("/")[0] not in {"lake.msgpack", "probe", identity.lake_id}]
    assert len(left) == 2
    reader = await LogReader.open(ProcessStore(place, actor="stranger"), identity)
    assert reader.state.next_step == len(world.ledger.steps) - 2, "its cut leaves out two"
