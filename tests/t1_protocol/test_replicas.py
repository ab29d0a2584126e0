"""Replicas under kills, other replicators, reclaims of both sides, and lakes that are no longer what they were."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio
from doubles.faults import FALSE_412, LOST_RESPONSE, OWN_412, THROTTLED_503, Weighted
from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock
from fork_stores import CUT, Stores, reclaimed
from lakework import list_groups, reclaim
from process_store import ProcessStore
from producer_world import World, append, feed, simulate
from replica_stores import COPY, HOLD, Pair, copied, grows, home_hold
from scenarios import scenario
from small_world import NEED, PAUSES_MAX, STEPS, checkpoint, clean, flipped, group, grow, move_on, process, small

from stepfs.errors import CorruptError, RefusedError, StoreUnreachableError
from stepfs.format.commit import CommitKind, encode_commit
from stepfs.format.identity import HOME_GROUP
from stepfs.format.ids import Step
from stepfs.format.keys import LAKE, log_prefix, numbered, plan_key, snapshot_prefix
from stepfs.lake.control import Control, Group
from stepfs.lake.fork import group_name
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.append import ownerless, retire_producer, seal
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.replicate import Copier, Replica
from stepfs.store.api import Entry
from stepfs_producer import AsyncProducer

REFUSED = "is a replica: produce to memory://home; if that is lost for good: stepfs fork 'memory://the copy' NEW"


async def happens(rng: random.Random, pair: Pair) -> None:
    """The lake grows, or its run moves on and it is reclaimed, or the replica is."""
    world, what = pair.world, rng.random()
    async with pair.turn:  # a process has several requests on their way
        if what < 0.5:
            await grows(world, rng.randint(1, 3))
        elif what < 0.8:
            need = world.ledger.promises["run"]
            await checkpoint(world, "run", min(world.ledger.state.next_step, need + rng.choice([1, 2, 3, 12])))
            await clean(world)
        elif LAKE in pair.place.objects:
            await pair.reclaimed_there()
            await pair.is_sound()


async def killed_life(
    pair: Pair, name: str, kill_at: int, meanwhile: dict[int, Callable[[], Awaitable[None]]], **options: Any
) -> bool:
    """One life of `stepfs replicate`, killed at that await of either store; whether it came to its end."""
    copier = pair.copier(name)
    home: ProcessStore = copier.home
    with trio.CancelScope() as scope:

        def kill() -> None:
            scope.cancel()
            home.dead = copier.store.dead = True  # after kill -9 no clean-up code runs

        home.kill_at, home.kill, home.inside = kill_at, kill, meanwhile
        with suppress(StoreUnreachableError):
            await copied(copier, **options)
    return not home.dead


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("on", [grow, reclaimed], ids=["from the beginning", "from a snapshot"])
def test_killed_at_any_await_it_names_nothing_that_is_not_there_and_the_next_goes_on(on, stride: int) -> None:
    """R1, R5."""

    async def one(kill_at: int, world: World) -> bool:
        pair = Pair(world)
        through = await killed_life(pair, "victim", kill_at, {})
        await pair.is_sound()
        await pair.replicated("next")
        await pair.equals_home()
        return through

    reached = 0
    for kill_at in range(1, PAUSES_MAX, stride):
        if small(partial(one, kill_at), on=on, seed=kill_at):
            break
        reached += 1
    assert reached > 60 / stride


async def life_of_both(seed: int, world: World) -> tuple[int, int]:
    """Kills at random awaits, while the lake grows, is checkpointed and reclaimed. Returns (kills, gaps)."""
    rng, pair, kills = random.Random(seed), Pair(world), 0
    holds, first = rng.random() < 0.3, rng.choice([None, None, NEED, NEED + 3])
    options = {"keeps_all": holds, "first": None if first is None else Step(first)}
    try:
        for life in range(rng.randint(2, 6)):
            at = rng.randint(1, rng.choice([40, 90, 160]))
            meanwhile = {rng.randint(1, at): partial(happens, rng, pair) for _ in range(rng.randint(0, 2))}
            kills += not await killed_life(pair, f"life {life}", at, meanwhile, **options)
            await pair.is_sound()
            if rng.random() < 0.5:
                await happens(rng, pair)
        await world.settle()  # a commit of a life that was killed may still be on its way
        await pair.replicated("last", **options)
    except RefusedError as error:
        if "has reclaimed" not in str(error):
            raise
        await pair.is_sound()
        return kills, 1
    await pair.equals_home()
    await world.settle()
    await pair.reclaimed_there()
    await pair.equals_home()
    assert not world.ledger.broken, world.ledger.broken
    return kills, 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trials", [12, pytest.param(400, marks=pytest.mark.nightly)])
def test_killed_at_random_awaits_while_the_lake_lives(trials: int) -> None:
    """R1, R5, R6, R9: data first, whoever is killed, and both sides reclaim."""
    kills = gaps = 0
    for seed in range(trials):
        killed, gap = small(partial(life_of_both, seed), on=grow, seed=seed)
        kills, gaps = kills + killed, gaps + gap
    assert kills > 2 * trials
    assert gaps < trials / 2


@pytest.mark.parametrize("fault", [LOST_RESPONSE, OWN_412, THROTTLED_503, FALSE_412])
@scenario(small, on=reclaimed)
async def test_stores_that_answer_ambiguously_give_one_replica(world: World, fault: object) -> None:
    pair = Pair(world)
    for attempt in range(40):
        copier = pair.copier(f"try {attempt}")
        copier.store.plan = Weighted({fault: 0.2})
        with suppress(StoreUnreachableError):
            await copied(copier)
            break
        await pair.is_sound()
    await pair.equals_home()


def test_two_first_copies_are_one_replica() -> None:
    """R5: all of another one, of a lake that has grown, happens inside each await of the first."""

    async def one(at: int, world: World) -> bool:
        pair = Pair(world)
        copier = pair.copier("first")
        home: ProcessStore = copier.home

        async def other() -> None:
            await grows(world, 4)
            await pair.replicated("second")

        home.inside[at] = other
        await copied(copier)
        await pair.equals_home()
        return not home.inside

    reached = 0
    while small(partial(one, 1 + 8 * reached), on=reclaimed, seed=reached):
        reached += 1
    assert reached > 6


def test_a_first_copy_whose_steps_go_is_no_damage_and_begins_again() -> None:
    """A group that is left of an earlier replica at this place holds later steps only."""

    async def one(at: int, world: World) -> bool:
        pair = Pair(world)
        await Group(Control(process(world, "former"), world.identity, TrioClock()), HOLD).add(Step(12))
        copier = pair.copier("it")
        home: ProcessStore = copier.home

        async def moves_on() -> None:
            await checkpoint(world, "run", 12)
            await clean(world)

        home.inside[at] = moves_on
        try:
            await copied(copier)
        except RefusedError as error:
            said.append(str(error))
            if not said[-1].endswith("replicate again"):
                pair = Pair(world)  # as it says: in another place
            await pair.replicated("next")
        assert (await pair.equals_home()).first_live_step in {NEED, 12}
        return not home.inside

    reached, said = 0, []
    while small(partial(one, 20 + 5 * reached), on=reclaimed, seed=reached):
        reached += 1
    assert reached > 8
    assert "memory://home has reclaimed steps before they were copied; replicate again" in said


@scenario(small, on=grow)
async def test_nobody_else_commits_to_a_replica(world: World) -> None:
    """R2."""
    pair = Pair(world)
    await pair.replicated("it")
    before = dict(pair.place.objects)
    reader = await LogReader.open(pair.store, await open_lake(pair.store))
    with pytest.raises(RefusedError) as refused:
        await seal(reader, TrioClock())
    assert str(refused.value) == f"{COPY} {REFUSED}"
    with pytest.raises(RefusedError, match="is a replica: produce to"):
        await retire_producer(reader, "a", TrioClock())
    with pytest.raises(RefusedError, match="is a replica: produce to"):
        async with AsyncProducer("memory://", producer_id="a", store=pair.store, clock=TrioClock()):
            pass
    assert pair.place.objects == before


@scenario(small, on=grow)
async def test_a_replica_is_never_shortened_and_follows_no_other_history(world: World) -> None:
    """R3: the lake was restored from a backup, seen at a start and each minute, also after it went on."""
    backup = dict(world.shared.objects)
    pair = Pair(world)
    await grows(world, 2)
    replica = await pair.replicated("it")
    world.shared.watch = None  # the ledger knows no going back
    for key in [key for key in world.shared.objects if key not in backup]:
        world.shared.remove(key)
    with pytest.raises(
        RefusedError, match=r"does not have version 2. of its log as memory://the copy has it: it was rest"
    ):
        await pair.opened("after")
    await trio.sleep(60)
    with pytest.raises(RefusedError, match="was restored"):
        await replica.round()
    before = dict(pair.place.objects)
    for _ in range(3):
        async with AsyncProducer(
            "memory://", producer_id="c", store=process(world, "c"), clock=TrioClock()
        ) as producer:
            for number in range(4):
                await append(producer, number)
    with pytest.raises(RefusedError, match="was restored"):
        await replica.round()
    with pytest.raises(RefusedError, match="was restored"):
        await pair.opened("later")
    logs = log_prefix(world.identity.lake_id)
    assert {key for key in pair.place.objects if key.startswith(logs)} == {k for k in before if k.startswith(logs)}


@scenario(small, on=grow)
async def test_a_place_that_hides_the_new_replica_once_is_tried_again(world: World) -> None:
    """Seed 4000713: a store that lies about an object of a moment ago ended the replicator as if no lake were there."""
    pair = Pair(world)
    copier, looks = pair.copier("it"), list[str]()
    get = copier.store.get

    async def hides(key: str, **options: int) -> bytes | None:
        looks.extend([key] * (key == LAKE))
        return None if looks and key == LAKE and len(looks) <= 2 else await get(key, **options)

    copier.store.get = hides  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachableError, match=r"does not show what was written there; .*again"):
        await Replica.open(copier, clock=TrioClock())
    await Replica.open(copier, clock=TrioClock())
    await pair.replicated("after")


@scenario(small, on=grow)
async def test_one_that_slept_while_another_made_the_replica_tells_nobody_to_delete_it(world: World) -> None:
    """Seed 675952656: both the lake and the replica had given up the version where its log began."""
    pair = Pair(world)
    copier = pair.copier("it")
    create = copier.store.create

    async def sleeps(key: str, body: bytes) -> Any:
        if "/control/" in key:
            copier.store.create = create  # type: ignore[method-assign]
            replica = await pair.replicated("other")
            prefix, base = snapshot_prefix(world.identity.lake_id), replica.log.control.floor
            assert base > 0
            for shared in (world.shared, copier.store.shared):
                shared.remove(numbered(prefix, base))
        return await create(key, body)

    copier.store.create = sleeps  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachableError, match="another process has begun the replica"):
        await Replica.open(copier, clock=TrioClock())


@scenario(small, on=grow)
async def test_a_replica_that_is_being_made_has_no_identity_to_lose(world: World) -> None:
    """Seed 4000713: its log was opened slowly, and the store hid the version to look at again."""
    pair = Pair(world)
    copier, slow = pair.copier("it"), []
    find, get = copier.store.list, copier.store.get

    async def hangs(prefix: str, **options: Any) -> list[Entry]:
        if "/log/" in prefix and not slow:
            await trio.sleep(15)
            slow.append(prefix)
        return await find(prefix, **options)

    async def hides(key: str, **options: int) -> bytes | None:
        return None if slow and "/log/" in key else await get(key, **options)

    copier.store.list, copier.store.get = hangs, hides  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachableError, match="does not show what was written there"):
        await Replica.open(copier, clock=TrioClock())
    assert slow
    await pair.replicated("after")


@scenario(small, on=grow)
async def test_another_lake_at_the_url_is_not_copied(world: World) -> None:
    """R4: at a start, and while it runs."""
    pair = Pair(world)
    replica = await pair.replicated("it")
    world.shared.remove(LAKE)
    other = await create_lake(process(world, "init"), slices=2, clock=TrioClock())
    with pytest.raises(RefusedError, match=f"is lake {world.identity.lake_id}, and memory://home is {other.lake_id}"):
        await pair.opened("again")
    await trio.sleep(60)
    with pytest.raises(RefusedError, match="the lake was recreated"):
        await replica.round()


@scenario(small, on=grow)
async def test_steps_that_were_reclaimed_before_they_were_copied_end_it(world: World) -> None:
    """R6: their data goes long before the log versions that name them."""
    pair = Pair(world)
    await pair.replicated("it")
    await grows(world)
    await checkpoint(world, "run", STEPS + 1)
    await clean(world)
    wanted = (
        f"has reclaimed steps from {STEPS} on that were not copied: make a new replica in another place, and delete"
    )
    reader = await pair.is_sound()
    assert reader is not None
    first = numbered(log_prefix(world.identity.lake_id), reader.state.version + 1)
    assert first in world.shared.objects, "the floor is still below it"
    with pytest.raises(RefusedError, match=wanted):
        await pair.replicated("again")
    for _ in range(3):
        await grows(world, 2)
        await checkpoint(world, "run", world.ledger.state.next_step)
        await clean(world)
    assert first not in world.shared.objects
    with pytest.raises(RefusedError, match=wanted):
        await pair.opened("later")
    await pair.is_sound()
    other = Pair(world)
    await other.replicated("anew")
    await other.equals_home()


@scenario(small, on=grow)
async def test_a_reclaimed_slot_that_a_sleeper_took_again_is_not_copied(world: World) -> None:
    """R7: it follows the replica's head as if it were the next commit."""
    pair = Pair(world)
    replica = await pair.replicated("it")
    await move_on(world, zombie_after=replica.log.state)
    assert numbered(log_prefix(world.identity.lake_id), replica.log.state.version + 1) in world.shared.objects
    with pytest.raises(RefusedError, match="has reclaimed steps"):
        await replica.follow()
    assert not (await LogReader.open(pair.store, replica.log.identity)).state.sealed


def test_a_reclaim_of_the_replica_deletes_nothing_that_its_log_will_name() -> None:
    """R9: data is there before its log; uploads that nothing will ever name are not."""

    async def one(at: int, world: World) -> bool:
        pair = Pair(world)
        await pair.replicated("it")
        await grows(world, 3)
        copier = pair.copier("slow")
        home: ProcessStore = copier.home

        async def cleaned() -> None:
            await Group(Control(pair.store, world.identity, TrioClock()), HOME_GROUP).add(Step(NEED), keep=1)
            await pair.reclaimed_there()

        home.inside[at] = cleaned
        await copied(copier)
        await pair.equals_home()
        return not home.inside

    reached = 0
    while small(partial(one, 1 + 3 * reached), on=reclaimed, seed=reached):
        reached += 1
    assert reached > 10


async def forked(world: World) -> tuple[World, Stores, ObjectMap]:
    """A fork, as a world of its own, which has made steps beside those that it shares."""
    place = ObjectMap()
    stores = Stores.of(world, place, "fork")
    child = await stores.fork(world.identity, CUT)
    return World(place, child, world.ledger), stores, place


@scenario(small, on=reclaimed)
async def test_a_replica_of_a_fork_begins_behind_what_the_fork_shares(world: World) -> None:
    """R15."""
    twin, stores, place = await forked(world)
    copies = ObjectMap()
    copy = ProcessStore(copies, actor="copy")
    copier = Copier(stores.child, copy)
    with pytest.raises(RefusedError, match=r"is a fork, and its steps 9 to 11 are in memory://fork: .* with --from 12"):
        await Replica.open(copier, clock=TrioClock())
    assert LAKE not in copies.objects
    await grows_alone(twin, 3)
    await copied(copier, first=Step(12))
    reader = await LogReader.open(copy, await open_lake(copy))
    assert (reader.first_live_step, reader.state.next_step) == (12, 15)
    for step in range(12, 15):
        key = (await reader.entry(Step(step))).tgb.key
        assert copies.objects[key] == place.objects[key]


async def grows_alone(world: World, count: int) -> None:
    """As `grows`, in a lake that the ledger does not watch."""
    async with AsyncProducer("memory://", producer_id="z", store=process(world, "z"), clock=TrioClock()) as producer:
        for number in range(count):
            await append(producer, number)


@scenario(small, on=reclaimed)
async def test_a_reclaim_of_the_replica_of_a_fork_releases_nothing_in_the_parent(world: World) -> None:
    """R12, even where the replica says that it is at the fork's own URL."""
    twin, stores, _ = await forked(world)
    await grows_alone(twin, 3)
    copy = ProcessStore(ObjectMap(), actor="copy")
    await copied(Copier(stores.child, copy), first=Step(12))
    copy.url = stores.child.url
    held = (await list_groups(stores.parent, world.identity))[group_name(twin.identity.lake_id)]
    asked: list[str] = []

    def opened(url: str) -> ProcessStore:
        asked.append(url)
        return stores.parent

    await Group(Control(copy, twin.identity, TrioClock()), HOME_GROUP).add(Step(14), keep=1)
    report = await reclaim(copy, await open_lake(copy), origins=OriginStores(copy, opened), clock=TrioClock())
    assert report.deleted_objects > 0
    assert asked == []
    assert (await list_groups(stores.parent, world.identity))[group_name(twin.identity.lake_id)] == held


@scenario(small, on=grow)
async def test_the_replica_gives_up_what_the_lake_gave_up_and_no_group_stays_there(world: World) -> None:
    pair = Pair(world)
    copier = pair.copier("it")
    seen: list[object] = []

    async def looks() -> None:
        seen.append(await home_hold(world))

    copier.home.inside[30] = looks
    replica = await copied(copier)
    assert seen[0] is not None, "it holds the lake's steps while it copies for the first time"
    assert await home_hold(world) is None
    assert await pair.reclaimed_there() == 0
    await clean(world)
    await trio.sleep(1)
    await replica.round()
    assert await pair.reclaimed_there() > 0
    reader = await pair.equals_home()
    assert reader.first_live_step == NEED


@scenario(small, on=grow)
async def test_runs_that_read_the_replica_hold_the_lake_and_its_producers(world: World) -> None:
    pair = Pair(world)
    replica = await pair.replicated("it")
    run = Group.of(pair.store, world.identity, "there", TrioClock())
    await run.register()
    await run.add(Step(4), keep=1)

    async def looked():
        await trio.sleep(1)
        await replica.round()
        return await home_hold(world)

    held = await looked()
    assert (held.need, held.fork, held.replica) == (4, "", COPY)
    await clean(world)
    assert world.ledger.first_live_step == 4
    await run.add(Step(6), keep=1)
    assert (await looked()).need == 6
    await run.add(Step(10_000), keep=1)  # a mistake there is none here
    assert (await looked()).need == STEPS - 1
    await run.retire()
    child = Group(Control(pair.store, world.identity, TrioClock()), f":fork/{'ab' * 16}")
    await child.register("memory://a fork of it")
    assert await looked() is None, "which has its data there"


@scenario(small, on=grow)
async def test_an_archive_holds_what_is_not_copied_and_no_producer_counts_it(world: World) -> None:
    pair = Pair(world)
    replica = await pair.replicated("it", keeps_all=True)
    held = await home_hold(world)
    assert (held.need <= STEPS, held.fork, held.replica) == (True, COPY, COPY)
    await grows(world, 2)
    await checkpoint(world, "run", STEPS + 3)
    await clean(world)
    assert world.ledger.first_live_step == held.need, "what is behind was not copied yet"
    async with world.producer("a", max_lead=3) as producer:  # counted from the run, not from the archive
        with trio.fail_after(20):
            await feed(producer, (producer.position or 0) + 1)
    while await replica.round():
        pass
    await trio.sleep(1)
    await replica.round()
    assert (await home_hold(world)).need == STEPS + 4
    await clean(world)
    assert world.ledger.first_live_step == STEPS + 3
    await pair.reclaimed_there()
    reader = await pair.equals_home()
    assert reader.first_live_step == 0


@scenario(small, on=grow)
async def test_an_archive_of_a_lake_without_groups_lets_it_keep_everything(world: World) -> None:
    await group(world, "run").retire()
    world.ledger.release("run")
    pair = Pair(world)
    await pair.replicated("it", keeps_all=True)
    assert await home_hold(world) is None
    report = await clean(world)
    assert report.first_live_step == 0


@pytest.mark.logs("is unreadable, using an older one")
def test_a_snapshot_that_rots_while_a_replica_begins_is_not_believed() -> None:
    """Seed 9800094: it was sound when the data that it names was copied, and rotten when it was copied itself."""

    async def one(at: int, world: World) -> bool:
        pair = Pair(world)
        copier = pair.copier("it")
        prefix = snapshot_prefix(world.identity.lake_id)
        key = max(key for key in world.shared.objects if key.startswith(prefix))
        sound = world.shared.objects[key]

        async def rots() -> None:
            flipped(world, key)

        copier.home.inside[at] = rots
        with suppress(CorruptError):
            await copied(copier)
        world.shared.put(key, sound)
        await pair.replicated("restored")
        await pair.equals_home()
        return not copier.home.inside

    reached = 0
    while small(partial(one, 1 + 3 * reached), on=reclaimed, seed=reached):
        reached += 1
    assert reached > 8


@scenario(small, on=grow)
async def test_a_damaged_object_ends_it_behind_all_that_came_before(world: World) -> None:
    pair = Pair(world)
    await pair.replicated("it")
    await grows(world, 4)
    entries = world.ledger.steps[STEPS : STEPS + 8]
    bad = entries[5]
    sound = world.shared.objects[bad.tgb.key]
    flipped(world, bad.tgb.key)
    with pytest.raises(CorruptError, match=f"step {bad.step}: .*restore the object"):
        await pair.replicated("again")
    reader = await pair.is_sound()
    assert reader is not None
    assert STEPS < reader.state.next_step <= bad.step
    world.shared.remove(bad.tgb.key)
    with pytest.raises(CorruptError, match=f"step {bad.step}: the object is missing; restore it"):
        await pair.replicated("and again")
    world.shared.put(bad.tgb.key, sound)
    await pair.replicated("restored")
    await pair.equals_home()


@pytest.mark.parametrize("sound", [0, 1, 3])
@scenario(small, on=grow)
async def test_a_damaged_commit_ends_it_behind_all_that_came_before(world: World, sound: int) -> None:
    pair = Pair(world)
    replica = await pair.replicated("it")
    await grows(world, 4)
    bad = numbered(log_prefix(world.identity.lake_id), replica.log.state.version + sound + 1)
    flipped(world, bad)
    with pytest.raises(CorruptError, match=bad):
        await pair.replicated("again")
    reader = await pair.is_sound()
    assert reader is not None
    assert reader.state.version == replica.log.state.version + sound


@scenario(small, on=grow)
async def test_an_answer_that_was_wrong_once_is_read_again(world: World) -> None:
    pair = Pair(world)
    copier = pair.copier("it")
    read, wrong = copier.home.read_into, iter([True])

    async def reads(key: str, offset: int, buffer: memoryview, *more: object) -> int | None:
        got = await read(key, offset, buffer, *more)
        buffer[100] ^= next(wrong, False)
        return got

    copier.home.read_into = reads
    await Replica.open(copier, clock=TrioClock())
    await pair.replicated("next")
    await pair.equals_home()


@scenario(small, on=grow)
async def test_somebody_wrote_into_the_replica(world: World) -> None:
    pair = Pair(world)
    replica = await pair.replicated("it")
    pair.place.watch = None
    foreign = ownerless(replica.log.state, CommitKind.SEAL, TrioClock())
    await pair.store.create(numbered(log_prefix(world.identity.lake_id), foreign.version), encode_commit(foreign))
    await grows(world)
    with pytest.raises(RefusedError, match="somebody wrote into the replica; make a new one"):
        await replica.round()
    with pytest.raises(RefusedError, match="or somebody wrote into the replica"):
        await pair.opened("next")


@scenario(small, on=grow)
async def test_a_sealed_lake_is_copied_to_its_end(world: World) -> None:
    """And is sealed there, so that all uploads that no step names are orphans: none of them is a step's."""
    pair = Pair(world)
    await pair.replicated("it")
    await grows(world, 2)
    await seal(await LogReader.open(process(world, "operator"), world.identity), TrioClock())
    await pair.replicated("again")
    assert await pair.reclaimed_there() == 0
    assert (await pair.equals_home()).state.sealed


@pytest.mark.parametrize("first", [5, NEED, 12, STEPS, 10_000])
@scenario(small, on=grow)
async def test_a_replica_may_begin_at_any_step(world: World, first: int) -> None:
    """Also behind the base of its log; beyond the head, it begins there."""
    pair = Pair(world)
    replica = await pair.replicated("it", first=Step(first))
    live = min(first, STEPS)
    await pair.replicated("again", first=Step(2))  # it is there: begun is begun
    reader = await pair.equals_home()
    assert (reader.first_live_step, replica.copier.copied) == (live, STEPS - live)
    await grows(world, 2)
    await pair.replicated("later")
    await pair.equals_home()


@scenario(small, on=grow)
async def test_plans_are_there_before_the_epochs_that_name_them(world: World) -> None:
    pair = Pair(world)
    replica = await pair.replicated("it")
    home, key = process(world, "planned"), plan_key(world.identity.lake_id, "ab" * 16)
    await home.create(key, b"a plan")
    async with world.producer("a"):
        pass
    seen: list[bool] = []
    watch = pair.place.watch
    pair.place.watch = lambda event: seen.append(key in pair.place.objects) if "/log/" in event.keys[0] else None
    await replica.round()
    pair.place.watch = watch
    assert seen
    assert all(seen)
    later = f"{key}-libraries/x"
    await home.put(later, [b"{}"])
    await trio.sleep(60)
    await replica.round()
    assert pair.place.objects[later] == b"{}"


@scenario(simulate)
async def test_it_asks_seldom(world: World) -> None:
    """For one version with one object: at most six requests beside the two that move the object."""
    pair, versions = Pair(world), 20
    async with world.producer("a") as producer:
        await feed(producer, 1)
        await producer.flush()
        replica = await pair.replicated("it")
        home, copy = replica.copier.home.counts, replica.copier.store.counts
        before = home.requests + copy.requests
        for number in range(1, versions + 1):
            await append(producer, number)
            await producer.flush()
            assert not await replica.follow()
    assert (home.requests + copy.requests - before) / versions <= 6 + 2
    await pair.equals_home()


async def test_memory_of_a_request_that_failed_is_not_used_again() -> None:
    """A thread that was left alone may still write into it."""
    buffers = Copier(ProcessStore(ObjectMap(), actor="home"), ProcessStore(ObjectMap(), actor="copy"), 100)._buffers
    with suppress(StoreUnreachableError):
        async with buffers.leased(90) as left:
            raise StoreUnreachableError
    async with buffers.leased(90) as second:
        assert second.obj is not left.obj
    async with buffers.leased(80) as third:
        assert third.obj is second.obj
    assert buffers.bytes == 90


@scenario(small, on=grow)
async def test_memory_is_bounded_and_used_again(world: World) -> None:
    """Four objects at once where they fit, one where even that is more than the bound."""
    size = world.ledger.steps[0].tgb.size
    for bytes_max, most in ((1 << 30, 4), (2 * (size + 1), 2), (1, 1)):
        pair = Pair(world)
        copier = pair.copier(f"with {bytes_max}")
        copier = Copier(copier.home, copier.store, bytes_max)
        at_once, peak = 0, 0
        read = copier.home.read_into

        async def reads(key: str, offset: int, buffer: memoryview, *more: object, read=read) -> int | None:
            nonlocal at_once, peak
            at_once += 1
            peak = max(peak, at_once)
            got = await read(key, offset, buffer, *more)
            at_once -= 1
            return got

        copier.home.read_into = reads
        await Replica.open(copier, clock=TrioClock())
        assert peak == most
        assert copier._buffers.bytes <= max(bytes_max, size + 1)
        await pair.replicated("next")
        await pair.equals_home()
