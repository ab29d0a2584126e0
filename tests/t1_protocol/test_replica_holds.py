"""What a replica and its lake keep for each other: the hold at the lake, the group `home` at the replica, archives."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
import trio
from doubles.trio_clock import TrioClock
from fork_stores import reclaimed
from lakework import list_groups, reclaim
from process_store import ProcessStore
from producer_world import World, append
from replica_stores import COPY, HOLD, Pair, copied, grows, home_hold
from scenarios import scenario
from small_world import NEED, STEPS, checkpoint, clean, grow, process, small

from stepfs.errors import RefusedError, StoreUnreachableError
from stepfs.follow.parts import GroupFollower
from stepfs.format.identity import HOME_GROUP
from stepfs.format.ids import Step
from stepfs.format.keys import LAKE
from stepfs.lake.control import Control, Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Put


@scenario(small, on=grow)
async def test_a_run_at_an_archive_counts_for_producers_until_it_ends(world: World) -> None:
    pair = Pair(world)
    replica = await pair.replicated("it", keeps_all=True)
    run = Group.of(pair.store, world.identity, "there", TrioClock())
    await run.add(Step(11), keep=1)
    before = len(world.ledger.controls)
    marks, ends = [], (False, True)
    for ended in ends:
        if ended:
            await run.retire()
        await trio.sleep(1)
        await replica.round()
        held = await home_hold(world)
        marks.append((held.fork, held.replica))
    assert marks == [("", COPY), (COPY, COPY)]
    stood = [HOLD in record.groups for record in world.ledger.controls[before:]]
    assert all(stood), "a reclaim in between would take what was not copied"


@scenario(small, on=grow)
async def test_whether_it_is_an_archive_was_said_by_its_maker(world: World) -> None:
    """Two of them, with and without, changed the lake's record each second."""
    pair, other = Pair(world), Pair(world)
    await pair.replicated("plain")
    with pytest.raises(RefusedError, match=f"{COPY} was made without --keep-all, and is no archive"):
        await pair.replicated("asks for more", keeps_all=True)
    assert not (await open_lake(pair.store)).archive
    both = [await other.replicated("archive", keeps_all=True), await other.replicated("says nothing")]
    assert (await open_lake(other.store)).archive
    before = len(world.ledger.controls)
    for _ in range(10):
        await trio.sleep(1)
        for replica in both:
            await replica.round()
    assert len(world.ledger.controls) == before
    await checkpoint(world, "run", STEPS)
    await clean(world)
    await trio.sleep(1)
    await both[1].round()
    assert await other.reclaimed_there() == 0


def test_two_makers_with_different_wishes_make_one_replica() -> None:
    async def one(at: int, world: World) -> bool:
        pair = Pair(world)
        copier = pair.copier("plain")

        async def other() -> None:
            with suppress(RefusedError):
                await pair.replicated("archive", keeps_all=True)

        copier.home.inside[at] = other
        replica = await copied(copier)
        assert replica.keeps_all == (await open_lake(pair.store)).archive
        found.add(replica.keeps_all)
        await pair.equals_home()
        return not copier.home.inside

    found: set[bool] = set()
    reached = 0
    while small(partial(one, 1 + 8 * reached), on=reclaimed, seed=reached):
        reached += 1
    assert found == {True, False}


@pytest.mark.parametrize("keeps_all", [True, False], ids=["an archive", "a run there"])
@scenario(small, on=grow)
async def test_what_is_not_copied_is_held_with_the_commits_without_steps(world: World, keeps_all: bool) -> None:
    """A producer has started since: the version of the next step is not the next version."""
    pair = Pair(world)
    replica = await pair.replicated("it", keeps_all=keeps_all)
    if not keeps_all:
        await Group.of(pair.store, world.identity, "there", TrioClock()).add(Step(STEPS), keep=1)
    await trio.sleep(1)
    await replica.round()
    for _ in range(4):
        await grows(world, 2)
    await checkpoint(world, "run", len(world.ledger.steps))
    await clean(world)
    await pair.replicated("late", keeps_all=keeps_all)
    await pair.equals_home()


@pytest.mark.parametrize("keeps_all", [True, False], ids=["an archive", "a run there"])
@scenario(small, on=grow)
async def test_one_that_slept_does_not_take_for_lost_what_another_has_copied(world: World, keeps_all: bool) -> None:
    pair = Pair(world)
    sleeper = await pair.replicated("sleeper", keeps_all=keeps_all)
    for _ in range(2):
        await grows(world, 2)
        other = await pair.replicated("other", keeps_all=keeps_all)
        await checkpoint(world, "run", len(world.ledger.steps))
        await trio.sleep(1)
        await other.round()
        await clean(world)
    await trio.sleep(60)
    with pytest.raises(StoreUnreachableError, match="others were faster; replicate again"):
        await sleeper.round()
    await pair.equals_home()


def test_one_that_sleeps_in_its_look_does_not_take_for_rolled_back_what_was_reclaimed() -> None:
    """It would advise to make another replica in place of a good one."""

    async def one(at: int, world: World) -> bool:
        pair = Pair(world)
        sleeper = await pair.replicated("sleeper")

        async def meanwhile() -> None:
            await grows(world, 2)
            await pair.replicated("other")
            await checkpoint(world, "run", len(world.ledger.steps))
            await clean(world)

        home = sleeper.home.store
        assert isinstance(home, ProcessStore)
        await trio.sleep(60)
        home.inside[home.pauses + at] = meanwhile
        with suppress(StoreUnreachableError):
            await sleeper.look()
        await pair.equals_home()
        return not home.inside

    reached = 1
    while small(partial(one, reached), on=grow, seed=reached):
        reached += 1
    assert reached > 4


@scenario(small, on=grow)
async def test_its_group_home_that_another_has_moved_on_is_left_there(world: World) -> None:
    """The lake gives more up while one of two looks, and the replica is reclaimed before it says what it saw."""
    pair = Pair(world)
    slow = await pair.replicated("slow")
    await clean(world)
    group, here = await group_there(pair), pair.store
    moved = [True]
    create = slow.log.store.create

    async def creates(key: str, body: bytes) -> Put:
        if "/control/" in key and moved:
            moved.clear()
            await group.add(Step(NEED + 2), keep=1)
            await reclaim(here, world.identity, clock=TrioClock())
        return await create(key, body)

    slow.log.store.create = creates
    await slow.keep()
    assert not moved
    assert (await list_groups(pair.store, world.identity))[HOME_GROUP].need == NEED + 2


async def group_there(pair: Pair) -> Group:
    return Group(Control(pair.store, await open_lake(pair.store), TrioClock()), HOME_GROUP)


@pytest.mark.parametrize("part", ["/control/", LAKE])
@scenario(small, on=grow)
async def test_a_false_conflict_begins_no_replica_without_its_first_objects(world: World, part: str) -> None:
    pair = Pair(world)
    copier = pair.copier("it")
    create, lies = copier.store.create, [True]

    async def creates(key: str, body: bytes) -> Put:
        if part in key and lies:
            lies.clear()
            return Put.EXISTS
        return await create(key, body)

    copier.store.create = creates
    with pytest.raises(StoreUnreachableError, match="taken and shows nothing there; replicate again"):
        await copied(copier)
    assert LAKE not in pair.place.objects
    await copied(copier)
    await pair.equals_home()
    assert HOME_GROUP in await list_groups(pair.store, world.identity)


@scenario(small, on=grow)
async def test_its_group_home_needs_no_step_that_it_does_not_have(world: World) -> None:
    """The lake has given up more than was copied, and its log still has the versions that name it."""
    pair = Pair(world)
    await pair.replicated("it")
    await grows(world)
    await checkpoint(world, "run", STEPS + 1)
    await clean(world)
    for name in ("again", "and again"):
        with pytest.raises(RefusedError, match="that were not copied"):
            await pair.replicated(name)
    assert (await list_groups(pair.store, world.identity))[HOME_GROUP].need == STEPS
    await pair.reclaimed_there()
    await pair.is_sound()


@pytest.mark.parametrize("first", [None, 12, STEPS + 1, 10_000])
@scenario(small, on=reclaimed)
async def test_live_bytes_are_those_of_the_steps_that_it_has(world: World, first: int | None) -> None:
    pair = Pair(world)
    await grows(world, 1)
    await pair.replicated("it", first=None if first is None else Step(first))
    await grows(world, 1)
    await pair.replicated("more")
    log = await LogReader.open(pair.store, await open_lake(pair.store))
    live = world.ledger.steps[log.first_live_step :]
    assert log.live_bytes == sum(entry.tgb.payload_bytes for entry in live)


@pytest.mark.logs("held back by max_lead")
@scenario(small, on=grow)
async def test_a_producer_that_waits_for_a_run_there_says_where(world: World, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(world)
    replica = await pair.replicated("it")
    run = Group.of(pair.store, world.identity, "there", TrioClock())
    await run.add(Step(3), keep=1)
    await trio.sleep(1)
    await replica.round()
    async with world.producer("a", max_lead=6) as producer:
        with trio.move_on_after(20):
            await append(producer, producer.position)
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        f"group '{HOLD}' needs all from step 3, 11 steps are committed since, by the runs that read the replica {COPY}:"
        in said
    )
    assert f"`stepfs status '{COPY}'`" in said
    assert f"stepfs retire-group memory://a {HOLD}" in said
    await run.add(Step(12), keep=1)
    await trio.sleep(1)
    await replica.round()
    async with world.producer("a", max_lead=6) as producer:
        with trio.fail_after(60):
            await append(producer, producer.position)


@scenario(small, on=grow)
async def test_a_run_that_moves_there_is_told_what_stays_behind(world: World) -> None:
    pair = Pair(world)
    await pair.replicated("it")
    said = []
    for store in (pair.store, pair.store, process(world, "home")):
        joining = Group.of(store, await open_lake(store), "moves", TrioClock())
        said.append(await GroupFollower(joining, _Shown(), lambda: None).register())
    assert said[0].endswith("until stepfs retire-group memory://home moves")
    assert (said[1], "checkpoint" in said[2]) == (None, False)


class _Shown:
    need = 0


@scenario(small, on=grow)
async def test_a_hold_that_a_roll_back_has_lost_is_taken_again(world: World) -> None:
    """The lake's log is what it was, so it is no other lake; its groups are those of the copy."""
    pair = Pair(world)
    replica = await pair.replicated("it")
    put_back = world.ledger.copied()
    await Group.of(pair.store, world.identity, "there", TrioClock()).add(Step(STEPS - 2), keep=1)
    await trio.sleep(1)
    await replica.round()
    assert (await home_hold(world)).need == STEPS - 2
    put_back()
    assert HOLD not in await list_groups(process(world, "stranger"), world.identity)
    await trio.sleep(100)
    await replica.round()
    assert (await home_hold(world)).need == STEPS - 2
