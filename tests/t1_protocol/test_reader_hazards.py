"""The hazards of COMMIT.md as a reader meets them; and mutants of the reader that must be caught.

The producer's side of the same hazards is in test_commit_hazards.py, hazard 10 in test_groups_and_reclaim.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest
import trio
from doubles.trio_clock import TrioClock
from process_store import ProcessStore
from producer_world import World, feed
from scenarios import scenario
from small_world import SEGMENT, STEPS, checkpoint, clean, grow, inside_everywhere, process, small

from stepfs.errors import AbsentError, CorruptError, OtherHistoryError, RefusedError, StepfsError
from stepfs.follow.follower import IDENTITY_CHECK_S, Changes, Follower
from stepfs.follow.waits import Waits
from stepfs.format.commit import CommitKind, encode_commit
from stepfs.format.ids import SegmentIndex, Step, Version
from stepfs.format.keys import index_prefix, log_prefix, numbered, snapshot_prefix
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import LogState, decode_snapshot, encode_snapshot
from stepfs.lake.identity import create_lake
from stepfs.lake.log import reader as reader_room
from stepfs.lake.log import snapshots as snapshots_room
from stepfs.lake.log.append import ownerless
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import write_snapshot
from stepfs.store.api import Store
from stepfs.view.tree import Tree, ViewOptions

POLLS_MAX = 20


def caught() -> pytest.RaisesExc[BaseException]:
    return pytest.raises((AssertionError, StepfsError, pytest.fail.Exception))


async def move_on(world: World, *, zombie_after: LogState | None = None, chained: bool = True) -> None:
    """Producers commit, trainers consume, a reclaimer deletes; then a sleeping writer takes a deleted slot."""
    async with world.producer("a") as producer:
        await feed(producer, 16)
    async with world.producer("d") as producer:
        await feed(producer, 3)
    await checkpoint(world, "run", len(world.ledger.steps) - 2)
    await clean(world)
    if zombie_after is not None:
        assert zombie_after.version + 1 < world.ledger.floor_version
        before = zombie_after if chained else replace(zombie_after, digest=b"?" * 32)
        commit = ownerless(before, CommitKind.SEAL, TrioClock())
        slot = numbered(log_prefix(world.identity.lake_id), commit.version)
        await process(world, "zombie").create(slot, encode_commit(commit))
        assert world.ledger.counts["zombie slots"] == 1


async def reaches_the_end(world: World, reader: LogReader) -> None:
    """A bounded number of polls must show all that is committed, and nothing else at any time."""
    for _ in range(POLLS_MAX):
        await reader.poll()
        world.ledger.check_reader("reader", reader.state, reader.first_live_step)
        assert not world.ledger.broken, world.ledger.broken
        if reader.state.version == world.ledger.state.version:
            assert reader.first_live_step == world.ledger.first_live_step
            return
        await trio.sleep(1.0)
    raise AssertionError(f"still at version {reader.state.version} after {POLLS_MAX} polls")


async def hazard_01(world: World, *, zombie: bool = True, chained: bool = True, forked: bool = False) -> None:
    """A reader sleeps; the slot it will look at next is filled, consumed, deleted, and taken by a zombie. `forked`: a process
    that was forked from it goes on in its place.
    """
    reader = await LogReader.open(process(world, "reader"), world.identity)
    await move_on(world, zombie_after=reader.head if zombie else None, chained=chained)
    if forked:
        reader = await LogReader.continued(process(world, "worker"), world.identity, reader.state)
    await reaches_the_end(world, reader)
    assert not reader.state.sealed


@pytest.mark.parametrize("forked", [False, True], ids=["it wakes", "it forks"])
@pytest.mark.parametrize(
    "variant",
    [{}, {"chained": False}, {"zombie": False}],
    ids=["zombie", "zombie of another history", "empty slot"],
)
def test_hazard_01_a_reader_wakes_after_a_reclaim(variant: dict[str, bool], forked: bool) -> None:
    """It neither publishes what the slot holds, nor calls the lake corrupt, nor polls an empty slot for ever."""
    small(partial(hazard_01, **variant, forked=forked), on=grow)


@scenario(small, on=grow)
async def test_a_segment_that_a_zombie_completed_leaves_with_its_commit(world: World) -> None:
    """The reader remembered it when it read the slot; its steps are others than those that were committed."""
    reader = await LogReader.open(process(world, "reader"), world.identity)
    sealed = range(reader.state.first_segment, reader.state.next_step // SEGMENT)
    index = next(index for index in map(SegmentIndex, sealed) if reader.segments.get(index) is None)
    real = await reader.load_segment(index)
    entries = tuple(replace(entry, producer_id="zombie") for entry in real.entries)
    reader.segments.remember(replace(real, digest=b"?" * len(real.digest), entries=entries))
    await reader.reopen()
    for step in range(reader.first_live_step, reader.state.next_step):
        world.ledger.check_entry("reader", await reader.entry(Step(step)))
    assert not world.ledger.broken, world.ledger.broken


async def hazard_01_anywhere(world: World, store: ProcessStore) -> None:
    reader = await LogReader.open(store, world.identity)
    await reaches_the_end(world, reader)


async def zombies_everywhere(world: World) -> None:
    """As `move_on`, with a zombie in the first slot that anybody who slept through it could look at."""
    await move_on(world, zombie_after=world.ledger.state)


def test_hazard_01_inside_every_await_of_opening_and_following() -> None:
    assert inside_everywhere(grow, hazard_01_anywhere, zombies_everywhere, nothing) > 10


async def nothing(_world: World) -> None: ...


async def _trust(reader: LogReader, *, lenient: bool = False) -> bool:
    del lenient
    await reader.control.refresh()  # for the groups, which a reclaimer needs
    reader.state = reader.head
    return True


def never_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogReader, "confirm", _trust)


def no_probe_on_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    confirm = LogReader.confirm

    async def only_after_hits(reader: LogReader, *, lenient: bool = False) -> bool:
        del lenient
        return await (_trust if reader.head.version == reader.state.version else confirm)(reader)

    monkeypatch.setattr(LogReader, "confirm", only_after_hits)


def corrupt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest that does not match is believed to be damage without looking at the floor."""

    async def poll(reader: LogReader) -> bool:
        moved = await reader.catch_up()
        return moved and (await reader.confirm() or await reader.reopen() is None)

    monkeypatch.setattr(LogReader, "poll", poll)


@pytest.mark.parametrize(
    ("mutate", "variant"), [
        (never_look, {}), (never_look, {"zombie": False}), (no_probe_on_misses, {"zombie": False}),
        (corrupt_at_once, {"chained": False}),
    ],
)  # fmt: skip
def test_mutant_01_is_found(mutate, variant, monkeypatch):
    mutate(monkeypatch)
    with caught():
        small(partial(hazard_01, **variant), on=grow)


@scenario(small, on=grow)
async def test_a_digest_that_does_not_match_is_corruption_when_the_floor_stands_still(world: World) -> None:
    reader = await LogReader.open(process(world, "reader"), world.identity)
    other = ownerless(replace(reader.head, digest=b"?" * 32), CommitKind.SEAL, TrioClock())
    world.shared.put(numbered(log_prefix(world.identity.lake_id), other.version), encode_commit(other))
    with pytest.raises(CorruptError, match="does not continue"):
        await reader.poll()


async def hazard_07(world: World) -> None:
    """The lake is dropped and made anew under the same URL; the next time a reader looks back, it refuses."""
    operator = process(world, "operator")
    reader = await LogReader.open(process(world, "reader"), world.identity)
    await operator.delete([entry.key for entry in await operator.list("")])
    with pytest.raises(AbsentError, match="not a lake"):
        await reader.reopen()
    await create_lake(operator, slices=5)
    with pytest.raises(RefusedError, match="recreated"):
        await reader.reopen()


def without_the_ledger(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def unwatched(world: World) -> None:
        world.shared.watch = None
        await scenario(world)

    small(unwatched, on=grow)


def test_hazard_07_a_reader_refuses_a_recreated_lake() -> None:
    without_the_ledger(hazard_07)


def test_mutant_07_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def believe(store: Store, identity: LakeIdentity) -> None:
        """Never look at lake.msgpack again."""

    monkeypatch.setattr(reader_room, "check_identity", believe)
    with caught():
        without_the_ledger(hazard_07)


async def hazard_11(world: World) -> None:
    """Snapshots of a history that never was: of a zombie's state at the head, and of a version that is gone."""
    prefix = snapshot_prefix(world.identity.lake_id)
    store = process(world, "stale writer")
    truth = (await LogReader.open(store, world.identity)).state
    lie = replace(truth, digest=b"?" * 32, total_bytes=0, sealed=True)
    world.shared.put(numbered(prefix, truth.version), encode_snapshot(lie))
    await store.create(numbered(prefix, truth.version + 7), encode_snapshot(replace(lie, version=truth.version + 7)))
    reader = await LogReader.open(process(world, "reader"), world.identity)
    world.ledger.check_reader("reader", reader.state, reader.first_live_step)
    assert not world.ledger.broken, world.ledger.broken
    assert reader.state.total_bytes == truth.total_bytes
    assert not reader.state.sealed


def test_hazard_11_a_stale_snapshot_is_passed_over() -> None:
    small(hazard_11, on=grow)


def test_mutant_11_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trust(store: Store, identity: LakeIdentity, key: str, version: Version) -> LogState | None:
        del identity, version
        data = await store.get(key)
        return decode_snapshot(data, key) if data is not None else None

    monkeypatch.setattr(snapshots_room, "_read_confirmed", trust)
    with caught():
        small(hazard_11, on=grow)


@pytest.mark.logs("unreadable, using an older one")
@scenario(small, on=grow)
async def test_a_damaged_snapshot_costs_time_and_nothing_else(world: World) -> None:
    newest = max(key for key in world.shared.objects if key.startswith(snapshot_prefix(world.identity.lake_id)))
    world.shared.put(newest, world.shared.objects[newest][:-3])
    reader = await LogReader.open(process(world, "reader"), world.identity)
    assert reader.state.digest == world.ledger.state.digest


async def writes_a_snapshot(world: World, store: ProcessStore) -> None:
    """From nothing but the log, as a writer does whose predecessors died before writing theirs."""
    reader = await LogReader.open(store, world.identity)
    await write_snapshot(store, world.identity, reader.state, reader.segments, replace(reader.control))


async def without_snapshots(world: World) -> None:
    await grow(world)
    store = process(world, "operator")
    for prefix in (snapshot_prefix, index_prefix):
        for entry in await store.list(prefix(world.identity.lake_id)):
            world.shared.remove(entry.key)


def test_hazard_11_a_snapshot_writer_is_overtaken_at_any_await() -> None:
    """By commits, other snapshots and a reclaim that deletes the very log it reads: never an error, never a lie."""

    async def still_opens(world: World) -> None:
        await clean(world)
        reader = await LogReader.open(process(world, "reader"), world.identity)
        assert reader.state.digest == world.ledger.state.digest
        for step in range(reader.first_live_step, reader.state.next_step):
            world.ledger.check_entry("reader", await reader.entry(Step(step)))

    assert inside_everywhere(without_snapshots, writes_a_snapshot, move_on, still_opens) > 20


def test_slices_of_promised_steps_stay_readable_through_any_reclaim() -> None:
    """A reader that holds entries from before a reclaim goes on reading every step its group was promised."""

    async def reads_all(world: World, store: ProcessStore) -> None:
        reader = await LogReader.open(store, world.identity)
        for step in range(STEPS - 3, STEPS):
            entry = await reader.entry(Step(step))
            ref = entry.tgb.slice(0)  # type: ignore[arg-type]
            buffer = bytearray(ref.length)
            assert await store.read_into(entry.tgb.key, ref.offset, memoryview(buffer)) == ref.length

    async def reclaims(world: World) -> None:
        await checkpoint(world, "run", STEPS - 3)
        await clean(world)

    assert inside_everywhere(grow, reads_all, reclaims, nothing) > 10


async def rolled_back(world: World, more: int) -> Callable[[], Awaitable[None]]:
    """A copy of the store now; later the store becomes that copy, and goes on by `more` commits."""
    old = dict(world.shared.objects)

    async def roll_back() -> None:
        for key in set(world.shared.objects) - set(old):
            await process(world, "operator").delete([key])
        async with world.producer("after") as producer:
            await feed(producer, more)

    return roll_back


@pytest.mark.logs("cannot follow the lake")
@pytest.mark.parametrize("more", [0, 1, 4])
def test_a_reader_of_a_store_that_was_rolled_back_says_so_and_nobody_waits(more: int, caplog) -> None:
    """Shorter than what was read, as long, or longer: `more` is what was committed since the copy."""

    async def follows(world: World) -> None:
        roll_back = await rolled_back(world, more)
        async with world.producer("d") as producer:
            await feed(producer, 2)
        reader, changes = await LogReader.open(process(world, "reader"), world.identity), Changes()
        shown = reader.state

        async def own_id() -> str:
            return world.identity.lake_id

        follower = Follower(reader, changes, 0.1, own_id, lambda: None)
        waits = Waits(Tree(reader, ViewOptions(wait=True)), reader, changes, deadline_s=300.0)
        async with trio.open_nursery() as nursery:
            for part in (follower.run, waits.run):
                await nursery.start(part)
            await roll_back()
            began_s = trio.current_time()
            with pytest.raises(OtherHistoryError, match="mount again"):
                await waits.for_commit(Step(shown.next_step), 0)
            assert trio.current_time() - began_s <= 2 * IDENTITY_CHECK_S + 3
            assert reader.state == shown, "nothing of the other history is shown"
            await trio.sleep(30)
            assert follower.trouble is not None
            assert "another history" in follower.trouble
            nursery.cancel_scope.cancel()

    small(follows, on=grow)
    assert "answers again" not in caplog.text


@scenario(small, on=grow)
async def test_a_reader_whose_newest_commit_was_reclaimed_is_not_led_astray(world: World) -> None:
    """Wherever it stood when it was frozen: also at the last version below the floor."""
    readers = []
    async with world.producer("a") as producer:
        for total in range(10, 16):
            await feed(producer, total)
            await producer.flush()
            readers.append(await LogReader.open(process(world, f"frozen at {total}"), world.identity))
    await checkpoint(world, "run", len(world.ledger.steps))
    await clean(world)
    newest = await LogReader.open(process(world, "stranger"), world.identity)
    assert newest.control.floor - 1 in [reader.state.version for reader in readers]
    for reader in readers:
        await reader.check_history()
        assert reader.astray is None
        await reader.poll()
        assert reader.state == newest.state
