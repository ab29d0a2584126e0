"""A fork that is killed at any of its awaits is a whole lake, or none; what it holds in its parent, the next one names.

Parent and fork are two stores of one process, so its awaits are counted over both.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pytest
import trio
from doubles.faults import FALSE_412, LOST_RESPONSE, OWN_412, THROTTLED_503, Weighted
from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock
from lakework import list_groups, reclaim
from process_store import ProcessStore
from producer_world import SLICES, World, feed
from scenarios import scenario
from small_world import NEED, PAUSES_MAX, STEPS, checkpoint, clean, group, grow, process, small

from stepfs.errors import RefusedError, StoreUnreachableError
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.keys import LAKE
from stepfs.format.records import LakeIdentity
from stepfs.lake.control import Group
from stepfs.lake.fork import Cut, fork
from stepfs.lake.fork import group_name
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores

CUT = Cut(Step(10), Step(10), Step(12))
AROUND = [*range(NEED, 10), *range(12, STEPS)]


async def reclaimed(world: World) -> None:
    """The first live step is in the middle of a segment."""
    await grow(world)
    await clean(world)


@dataclass
class Stores:
    """One process's doors to the parent and to the place of the fork; a kill closes both."""

    parent: ProcessStore
    child: ProcessStore

    @classmethod
    def of(cls, world: World, place: ObjectMap, name: str) -> Stores:
        child = ProcessStore(place, actor=f"{name} there")
        child.url = "memory://the fork"  # the place has one name, whoever forks to it
        return cls(process(world, name), child)

    @property
    def pauses(self) -> int:
        return self.parent.pauses + self.child.pauses

    async def fork(self, identity: LakeIdentity, cut: Cut = CUT) -> LakeIdentity:
        parent = await LogReader.open(self.parent, identity)
        return await fork(parent, self.child, cut, TrioClock())


async def forked_until(world: World, place: ObjectMap, name: str, kill_at: int) -> bool:
    """Fork, killed at the await of that number over both stores; whether it got through."""
    stores = Stores.of(world, place, name)
    with trio.CancelScope() as scope:
        for store in (stores.parent, stores.child):
            step = store._pause

            async def counted(seconds: float, step=step) -> None:  # type: ignore[no-untyped-def]
                if stores.pauses + 1 == kill_at:
                    scope.cancel()
                    stores.parent.dead = stores.child.dead = True  # after kill -9 no clean-up code runs
                    await trio.lowlevel.checkpoint()
                await step(seconds)

            store._pause = counted  # type: ignore[method-assign]
        try:
            await stores.fork(world.identity)
        except StoreUnreachableError:
            assert stores.child.dead
    return not stores.child.dead


async def holders(world: World) -> set[str]:
    groups = await list_groups(process(world, "operator"), world.identity)
    return {name for name in groups if name.startswith("fork:")}


async def retired_by_hand(world: World, place: ObjectMap) -> set[str]:
    """What the manual says about forks that were killed: retire the group, delete what was written under its id."""
    made = (await open_lake(ProcessStore(place, actor="operator"))).lake_id
    others = await holders(world) - {group_name(made)}
    for name in others:
        await group(world, name).retire()
        for key in [key for key in place.objects if key.startswith(name.removeprefix("fork:"))]:
            place.remove(key)
    return others


async def is_whole(world: World, place: ObjectMap, steps: list[int]) -> LakeIdentity:
    """A stranger reads in the fork what those steps of the parent hold, and nothing of another fork is left."""
    stores = Stores.of(world, place, "stranger")
    identity = await open_lake(stores.child)
    reader = await LogReader.open(stores.child, identity)
    assert reader.state.next_step - reader.first_live_step == len(steps)
    for step, of_parent in enumerate(steps, start=reader.first_live_step):
        entry, truth = await reader.entry(Step(step)), world.ledger.steps[of_parent]
        assert (entry.tgb.key, entry.producer_id) == (truth.tgb.key, truth.producer_id)
        ref = entry.tgb.slice(SliceIndex(SLICES - 1))
        assert await stores.parent.read_into(entry.tgb.key, ref.offset, memoryview(bytearray(ref.length)))
    assert await holders(world) == {group_name(identity.lake_id)}
    strays = {key for key in place.objects if not key.startswith((f"{identity.lake_id}/", "probe/"))}
    assert strays == {LAKE}
    return identity


@pytest.mark.logs("an earlier fork to here")
def test_a_fork_killed_at_any_await_is_whole_or_no_lake_and_the_next_names_its_group(caplog) -> None:
    finished = named = 0

    async def one(kill_at: int, world: World) -> bool:
        nonlocal finished, named
        place = ObjectMap()
        through = await forked_until(world, place, "victim", kill_at)
        caplog.clear()
        held = await holders(world)
        if LAKE in place.objects:
            finished += not through
            with pytest.raises(RefusedError, match="is a lake already"):
                await Stores.of(world, place, "next").fork(world.identity)
        else:
            await Stores.of(world, place, "next").fork(world.identity)
            said = "".join(record.getMessage() for record in caplog.records)
            assert held == {name for name in held if f"--group {name} --retire" in said}
            named += len(held)
            assert await retired_by_hand(world, place) == held
        await is_whole(world, place, AROUND)
        await clean(world)
        assert not world.ledger.broken, world.ledger.broken
        return through

    for kill_at in range(1, PAUSES_MAX):
        if small(partial(one, kill_at), on=reclaimed, seed=kill_at):
            break
    assert kill_at > 40
    assert finished > 0, "it was also killed behind the create of the lake's identity"
    assert named > 30


@pytest.mark.logs("an earlier fork to here")  # that one is refused, and undoes itself
def test_two_forks_to_one_place_leave_one_lake() -> None:
    """All of another fork happens inside each await of the first."""

    async def one(at: int, world: World) -> bool:
        place = ObjectMap()
        first = Stores.of(world, place, "first")

        async def other() -> None:
            with suppress(RefusedError):
                await Stores.of(world, place, "second").fork(world.identity)

        (first.child if at > 0 else first.parent).inside[abs(at)] = other
        try:
            await first.fork(world.identity)
        except RefusedError as error:
            assert "is a lake already" in str(error)  # noqa: PT017
        if first.child.inside or first.parent.inside:
            return False
        await is_whole(world, place, AROUND)
        return True

    for side in (1, -1):
        reached = 0
        while small(partial(one, side * (reached + 1)), on=reclaimed, seed=reached):
            reached += 1
        assert reached > 5


@pytest.mark.logs("an earlier fork to here")
@pytest.mark.parametrize("fault", [LOST_RESPONSE, OWN_412, THROTTLED_503, FALSE_412])
@scenario(small, on=reclaimed)
async def test_a_store_that_answers_ambiguously_gives_one_whole_fork(world: World, fault: object) -> None:
    """However often it takes: what is there in the end is one fork."""
    place = ObjectMap()
    for attempt in range(20):
        stores = Stores.of(world, place, f"fork {attempt}")
        stores.child.plan = Weighted({fault: 0.3})  # type: ignore[dict-item]
        try:
            await stores.fork(world.identity)
        except (StoreUnreachableError, RefusedError):
            continue
        break
    await world.settle()
    with pytest.raises(RefusedError, match="is a lake already"):
        await Stores.of(world, place, "last").fork(world.identity)
    await retired_by_hand(world, place)
    await is_whole(world, place, AROUND)


@pytest.mark.logs("an earlier fork to here")
def test_a_fork_of_a_fork_killed_at_any_await() -> None:
    """The grandchild's data lies two origins away; its group is in the child."""

    async def one(kill_at: int, world: World) -> bool:
        place, below = ObjectMap(), ObjectMap()
        child = await Stores.of(world, place, "child").fork(world.identity)
        twin = World(place, child, world.ledger)
        through = await forked_until(twin, below, "victim", kill_at)
        if not through and LAKE not in below.objects:
            await Stores.of(twin, below, "next").fork(child, CUT)
        there = ProcessStore(below, actor="stranger")
        reader = await LogReader.open(there, await open_lake(there))
        assert len(reader.state.origins) == 2
        assert (await reader.entry(Step(NEED))).tgb.origin == 2
        groups = await list_groups(ProcessStore(place, actor="operator"), child)
        assert group_name(reader.identity.lake_id) in groups
        return through

    for kill_at in range(3, PAUSES_MAX, 3):
        if small(partial(one, kill_at), on=reclaimed, seed=kill_at):
            break
    assert kill_at > 40


def test_reclaimers_that_advance_inside_any_await_stop_no_fork() -> None:
    """The fork's group comes after them or before them, and the fork is of what is live by then."""

    async def one(at: int, world: World) -> bool:
        place = ObjectMap()
        stores = Stores.of(world, place, "fork")

        async def further() -> None:
            async with world.producer("d") as producer:
                await feed(producer, 2)
            await checkpoint(world, "run", 10)
            await clean(world)

        stores.parent.inside[at] = further
        await stores.fork(world.identity)
        if stores.parent.inside:
            return False
        child = ProcessStore(place, actor="stranger")
        reader = await LogReader.open(child, await open_lake(child))
        for step in range(reader.first_live_step, reader.state.next_step):
            key = (await reader.entry(Step(step))).tgb.key
            assert key in world.shared.objects, f"step {step} was deleted under the fork"
        return True

    reached = 0
    while small(partial(one, reached + 1), on=reclaimed, seed=reached):
        reached += 1
    assert reached > 10


@pytest.mark.logs("holds the steps of this fork no more")
@pytest.mark.parametrize("step", [11, 12], ids=["moves on", "lets go"])
def test_a_reclaim_of_a_fork_revives_no_group_that_another_has_retired(step: int) -> None:
    """Another reclaimer of the fork, or an operator, inside any await that it has in the parent."""

    async def one(at: int, world: World) -> bool:
        place = ObjectMap()
        child_store = Stores.of(world, place, "fork").child
        child = await Stores.of(world, place, "fork").fork(world.identity)
        await Group.of(child_store, child, "run", TrioClock()).add(Step(step), keep=1)
        slow = process(world, "slow")

        async def retires() -> None:
            await group(world, group_name(child.lake_id)).retire()

        slow.inside[at] = retires
        origins = OriginStores(child_store, lambda _: slow)
        report = await reclaim(child_store, child, origins=origins, clock=TrioClock())
        assert report.first_live_step == step
        if slow.inside:
            return False
        assert await holders(world) == set()
        return True

    reached = 0
    while small(partial(one, reached + 1), on=reclaimed, seed=reached):
        reached += 1
    assert reached > 5
