"""Forks that are killed at any await, the groups by which they hold their parent, and producers that go back to the cut."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import pytest
import trio
from doubles.faults import FALSE_412, LOST_RESPONSE, OWN_412, THROTTLED_503, Weighted
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from fork_stores import AROUND, CUT, Stores, holders, is_whole, reclaimed
from lakework import list_groups, reclaim
from process_store import ProcessStore
from producer_world import World, append, feed, simulate
from scenarios import scenario
from small_world import NEED, PAUSES_MAX, checkpoint, clean, group, process, small

from stepfs.errors import RefusedError, StoreUnreachableError, UsageError
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Step
from stepfs.format.keys import LAKE
from stepfs.lake.control import Group
from stepfs.lake.fork import NO_END, Cut, fork, group_name
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify.repair import repair_control
from stepfs.store.api import Put
from stepfs_producer import AsyncProducer


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


async def retired_by_hand(world: World, place: ObjectMap) -> set[str]:
    """What the manual says about forks that were killed: retire the group, delete what was written under its id."""
    made = (await open_lake(ProcessStore(place, actor="operator"))).lake_id
    others = await holders(world) - {group_name(made)}
    for name in others:
        await group(world, name).retire()
        for key in [key for key in place.objects if key.startswith(name.removeprefix(":fork/"))]:
            place.remove(key)
    return others


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
            assert held == {name for name in held if f" {name}" in said and "stepfs retire-group " in said}
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
    assert (await group(world, f":fork/{child.lake_id}").read()).need == NEED  # type: ignore[union-attr]
    (record,) = caplog.records
    parent, name = stores.parent.url, f":fork/{child.lake_id}"
    moved, ended = f"stepfs checkpoint {parent} --group {name} 13 --keep 1", f"stepfs retire-group {parent} {name}"
    assert record.getMessage().endswith(moved if step == 11 else ended)
    await checkpoint(world, "run", 14)
    await clean(world)
    await is_whole(world, place, AROUND)
    await let_go(stores, child, step)
    assert await holders(world) == ({f":fork/{child.lake_id}"} if step == 11 else set())


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
    assert record.getMessage().endswith(
        f"may reclaim them: stepfs checkpoint {stores.parent.url} --group {name} 9 --new-group"
    )
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
    await group(world, f":fork/{victim.lake_id}/data").register("memory://the fork")
    await group(world, ":fork/").register("memory://the fork")
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


async def steps_by(world: World, who: str, numbers: range) -> None:
    async with world.producer(who) as producer:
        assert producer.position == (numbers.start or None)
        for number in numbers:
            await append(producer, number)
            await producer.flush()


async def cut_at(world: World, step: int, *, rewind: bool = True) -> LogReader:
    reader = await LogReader.open(world.store("operator"), world.identity)
    child = FaultyStore(ObjectMap(), actor=f"child-{step}-{rewind}")
    cut = Cut(Step(step), Step(step), Step(step), Step(step))
    identity = await fork(reader, child, cut, TrioClock(), rewind=rewind)
    return await LogReader.open(child, identity)


@scenario(simulate)
async def test_producers_go_back_to_the_cut_and_later_ones_are_gone(world: World) -> None:
    await steps_by(world, "still", range(2))
    await steps_by(world, "p", range(3))  # steps 2 to 4
    await steps_by(world, "q", range(2))  # 5 and 6
    await steps_by(world, "p", range(3, 6))  # 7 to 9, by another incarnation
    await steps_by(world, "late", range(1))
    head = (await LogReader.open(world.store("operator"), world.identity)).state.producers
    for step, p, q in ((8, 4, 2), (6, 3, 1), (4, 2, None)):
        found = (await cut_at(world, step)).state.producers
        stood = {name: producer.next_seq for name, producer in found.items()}
        assert stood == {"p": p, "still": 2} | ({} if q is None else {"q": q}), step
        assert found["still"].position == head["still"].position
    whole = await cut_at(world, 11)
    assert {name: one.next_seq for name, one in whole.state.producers.items()} == {
        "p": 6,
        "q": 2,
        "still": 2,
        "late": 1,
    }
    kept = await cut_at(world, 6, rewind=False)
    assert kept.state.producers["p"].next_seq == 6, "without it, nothing is made again"


@scenario(simulate)
async def test_they_make_again_what_was_left_out_and_nothing_twice(world: World) -> None:
    await steps_by(world, "p", range(6))
    child = await cut_at(world, 4)
    async with AsyncProducer(child.store.url, producer_id="p", store=child.store) as producer:
        assert (producer.position, producer.next_seq) == (4, 4)
        for number in range(4, 6):
            await append(producer, number)
    await child.refresh()
    await child.confirm()
    entries = [await child.entry(Step(step)) for step in range(6)]
    assert [entry.tgb.seq for entry in entries] == list(range(6))
    parent = await LogReader.open(world.store("operator"), world.identity)
    for step, entry in enumerate(entries):
        assert entry.tgb.packed_slices == (await parent.entry(Step(step))).tgb.packed_slices


@scenario(simulate)
async def test_a_cut_through_a_commit_and_one_through_a_fork_s_beginning_are_refused(world: World) -> None:
    async with world.producer("p") as producer:
        for number in range(6):
            await append(producer, number)
    reader = await LogReader.open(world.store("operator"), world.identity)
    versions = [(await reader.entry(Step(step))).version for step in range(6)]
    inside = next(step for step in range(1, 6) if versions[step] == versions[step - 1])
    with pytest.raises(UsageError, match=f"--until {inside}: one commit holds steps .* use --until "):
        await cut_at(world, inside)
    child = await cut_at(world, 6)
    with pytest.raises(RefusedError, match="leave --rewind out"):
        await fork(
            child,
            FaultyStore(ObjectMap(), actor="x"),
            Cut(Step(3), Step(3), Step(3), Step(3)),
            TrioClock(),
            rewind=True,
        )
