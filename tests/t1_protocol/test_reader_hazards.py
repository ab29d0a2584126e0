"""The hazards of COMMIT.md as a reader meets them, slots that are taken again, and readers that were forked; with mutants."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from doubles.trio_clock import TrioClock
from mutants import _trust, never_look, only_probes_are_checked
from process_store import ProcessStore
from producer_world import World, append, feed
from scenarios import scenario
from small_world import (
    GROWN,
    SEGMENT,
    STEPS,
    checkpoint,
    clean,
    grow,
    inside_everywhere,
    move_on,
    process,
    small,
    without_snapshots,
)

from stepfs.errors import (
    AbsentError,
    CorruptError,
    OtherHistoryError,
    RefusedError,
    SealedError,
    StepfsError,
    StoreUnreachableError,
)
from stepfs.follow.changes import Changes
from stepfs.follow.follower import IDENTITY_CHECK_S, Follower
from stepfs.follow.parts import GroupFollower
from stepfs.follow.waits import Waits
from stepfs.format.commit import CommitKind, encode_commit
from stepfs.format.control import RECORD_ID_BYTES, encode_control
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SegmentIndex, Step, Version
from stepfs.format.keys import control_prefix, log_prefix, number_of, numbered, snapshot_prefix
from stepfs.format.snapshot import LogState, decode_snapshot, encode_snapshot
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake
from stepfs.lake.log import reader as reader_room
from stepfs.lake.log import snapshots as snapshots_room
from stepfs.lake.log.append import ownerless, seal
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import write_snapshot
from stepfs.lake.reclaim.run import ensure_snapshots
from stepfs.store.api import Put, Store
from stepfs.view.tree import Tree, ViewOptions
from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit.rebase import SealedRefusal

POLLS_MAX = 20


def caught() -> pytest.RaisesExc[BaseException]:
    return pytest.raises((AssertionError, StepfsError, pytest.fail.Exception))


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
    "variant", [{}, {"chained": False}, {"zombie": False}], ids=["zombie", "zombie of another history", "empty slot"]
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
    async def trust(store: Store, identity: LakeIdentity, key: str, version: Version, beside: Any) -> LogState | None:
        del identity, version, beside
        data = await store.get(key)
        return decode_snapshot(data, key) if data is not None else None

    monkeypatch.setattr(snapshots_room, "_read_confirmed", trust)
    with caught():
        small(hazard_11, on=grow)


async def writes_a_snapshot(world: World, store: ProcessStore) -> None:
    """From nothing but the log, as a writer does whose predecessors died before writing theirs."""
    reader = await LogReader.open(store, world.identity)
    await write_snapshot(store, world.identity, reader.state, reader.segments, replace(reader.control))


def test_hazard_11_a_snapshot_writer_is_overtaken_at_any_await() -> None:
    """By commits, other snapshots and a reclaim that deletes the very log it reads: never an error, never a lie."""

    async def still_opens(world: World) -> None:
        await clean(world)
        reader = await LogReader.open(process(world, "reader"), world.identity)
        assert reader.state.digest == world.ledger.state.digest
        for step in range(reader.first_live_step, reader.state.next_step):
            world.ledger.check_entry("reader", await reader.entry(Step(step)))

    assert inside_everywhere(without_snapshots, writes_a_snapshot, move_on, still_opens) > 20


@scenario(small, on=grow)
async def test_who_slept_while_newer_snapshots_took_the_place_of_older_ones_has_nothing_to_write(world: World) -> None:
    """Seed 9705670: the floor stood still, so the log has all versions from there on, and no snapshot below that state."""
    store, prefix = process(world, "slept"), snapshot_prefix(world.identity.lake_id)
    reader = await LogReader.open(store, world.identity)
    async with world.producer("d") as producer:
        for until in range(1, 17):
            await feed(producer, until)
            await producer.flush()
    await clean(world)
    version = reader.state.version
    for number in range(version + 1):  # a writer that dies leaves out its snapshot
        world.shared.remove(numbered(prefix, number))
    listed = [number_of(prefix, entry.key) for entry in await store.list(prefix)]
    assert 0 < world.ledger.floor_version <= version
    await write_snapshot(store, world.identity, reader.state, reader.segments, reader.control)
    await reader.control.refresh()
    assert await ensure_snapshots(reader, version) == version
    assert [number_of(prefix, entry.key) for entry in await store.list(prefix)] == listed


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


@pytest.mark.logs("cannot (follow the lake|read the record of group)")
@scenario(small, on=grow)
async def test_nobody_waits_for_steps_behind_checkpoints_that_a_roll_back_has_lost(world: World) -> None:
    """The log is what it was: producers may be held for what the group had recorded."""
    put_back = world.ledger.copied()
    await checkpoint(world, "run", STEPS)
    reader, changes = await LogReader.open(process(world, "reader"), world.identity), Changes()

    async def own_id() -> str:
        return world.identity.lake_id

    follower = Follower(reader, changes, 0.1, own_id, lambda: None)
    tree = Tree(reader, ViewOptions(wait=True))
    waits = Waits(tree, reader, changes, deadline_s=300.0)
    grouped = GroupFollower(Group.on(reader.control, "run"), tree, lambda: None)
    async with trio.open_nursery() as nursery:
        for part in (follower.run, waits.run, grouped.run):
            await nursery.start(part)
        put_back()
        began_s = trio.current_time()
        with pytest.raises(OtherHistoryError, match=r"control record 2.* mount again"):
            await waits.for_commit(Step(STEPS), 0)
        assert trio.current_time() - began_s <= IDENTITY_CHECK_S + 5
        nursery.cancel_scope.cancel()


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


def _newest_snapshot(world: World) -> LogState:
    prefix = snapshot_prefix(world.identity.lake_id)
    key = max(key for key in world.shared.objects if key.startswith(prefix))
    return decode_snapshot(world.shared.objects[key], key)


async def _opens(world: World, store: ProcessStore) -> None:
    await reaches_the_end(world, await LogReader.open(store, world.identity))


async def _a_zombie_follows_the_snapshot(world: World) -> None:
    """All goes on and is reclaimed; then a sleeper takes the slot right after the snapshot a reader may have begun with."""
    await move_on(world, zombie_after=_newest_snapshot(world))


async def _nothing(world: World) -> None:
    del world


def test_hazard_01_a_cold_start_whose_list_shows_a_slot_taken_again() -> None:
    assert inside_everywhere(grow, _opens, _a_zombie_follows_the_snapshot, _nothing) >= 8


async def _seals_after_a_reopen(world: World, store: ProcessStore) -> None:
    """What it follows is a zombie's slot, so it starts again from a snapshot, and takes the next slot unprobed."""
    reader = await LogReader.open(process(world, "before"), world.identity)
    await move_on(world, zombie_after=reader.head, chained=False)
    reader.store = store
    with suppress(SealedError):
        await seal(reader, TrioClock())
        assert world.ledger.state.sealed, "who was told that the lake is sealed finds it sealed"


async def _all_goes_on(world: World) -> None:
    """Until every slot that a writer may be about to take is filled, and deleted again."""
    if world.ledger.state.sealed:
        return
    for until in (18, 20, 22):
        async with world.producer("a") as producer:
            await feed(producer, until)
    await checkpoint(world, "run", len(world.ledger.steps))
    await clean(world)


def test_hazard_01_a_slot_taken_right_after_a_reopen_is_floor_checked() -> None:
    """A writer's own slot, never probed: the simulator lost a record so (a producer that followed a zombie's commit)."""
    assert inside_everywhere(grow, _seals_after_a_reopen, _all_goes_on, _nothing) >= 8


def test_mutant_only_probes_are_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    only_probes_are_checked(monkeypatch)
    with pytest.raises(AssertionError, match="another history"):
        inside_everywhere(grow, _opens, _a_zombie_follows_the_snapshot, _nothing)
    with pytest.raises(AssertionError, match="finds it sealed"):
        inside_everywhere(grow, _seals_after_a_reopen, _all_goes_on, _nothing)


@scenario(small, on=grow)
async def test_a_misled_writer_starts_again_though_the_slot_that_misled_it_is_gone(world: World) -> None:
    """Its reopen fails once; meanwhile the slot is deleted, and looks like the free slot behind its stale head."""
    reader = await LogReader.open(process(world, "writer"), world.identity)
    await move_on(world, zombie_after=reader.head, chained=False)
    reopen, failures = reader.reopen, [StoreUnreachableError("503")]

    async def fails_once() -> None:
        if failures:
            raise failures.pop()
        await reopen()

    reader.reopen = fails_once  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachableError):
        await reader.refresh()
    world.shared.remove(numbered(log_prefix(world.identity.lake_id), Version(reader.head.version + 1)))
    await reader.refresh()
    assert reader.head.version == world.ledger.state.version


def _refuses_by_an_error(patch: pytest.MonkeyPatch) -> None:
    """As one whose totals or positions are full."""
    rebase = commit_loop.rebase  # type: ignore[attr-defined]

    def refuse(*arguments: object) -> object:
        made = rebase(*arguments)  # type: ignore[arg-type]
        if isinstance(made, SealedRefusal):
            raise RefusedError("sealed")
        return made

    patch.setattr(commit_loop, "rebase", refuse)


@pytest.mark.parametrize("mutate", [lambda _: None, _refuses_by_an_error], ids=["a value", "an error"])
@scenario(small, on=grow)
async def test_no_producer_is_refused_by_a_slot_that_is_taken_again(world: World, mutate, monkeypatch):
    """A zombie's seal follows what it knows. A refusal would end it, and drop what it holds."""
    mutate(monkeypatch)
    async with world.producer("c", process(world, "c")) as producer:
        known = world.ledger.state
        await _all_goes_on(world)
        await move_on(world, zombie_after=known)
        await append(producer, 0)
    assert world.ledger.published["c"] == 1
    assert producer.tally.lost == 1


@scenario(small, on=grow)
async def test_a_lake_is_not_said_to_be_sealed_because_of_a_slot_that_is_taken_again(world: World) -> None:
    reader = await LogReader.open(process(world, "operator"), world.identity)
    await _all_goes_on(world)
    await move_on(world, zombie_after=reader.head)
    assert await seal(reader, TrioClock())
    assert world.ledger.state.sealed


class Overtaken(ProcessStore):
    """Before its next create in the log another takes the slot; before it looks there, a reclaim deletes that."""

    def __init__(self, world: World) -> None:
        super().__init__(world.shared, actor="c")
        self.world = world
        self.is_next = False

    async def create(self, key: str, body: bytes) -> Put:
        if not self.is_next or "/log/" not in key:
            return await super().create(key, body)
        self.is_next = False
        for who, until in (("a", 20), ("d", 3)):
            async with self.world.producer(who) as producer:
                await feed(producer, until)
        put = await super().create(key, body)
        await checkpoint(self.world, "run", len(self.world.ledger.steps) - 2)
        await clean(self.world)
        assert key not in self.shared.objects
        return put


@scenario(small, on=grow)
async def test_a_slot_that_was_taken_and_is_gone_is_not_taken_again(world: World) -> None:
    store = Overtaken(world)
    async with world.producer("c", store) as producer:
        store.is_next = True
        await append(producer, 0)
    assert world.ledger.published["c"] == 1
    assert producer.tally.lost == 1
    assert world.ledger.counts["zombie slots"] == 0


BESIDE = 1  # the look at the control sequence is made beside, and once more behind all else
CONFIRM = 3  # requests of the first look at the control sequence: a LIST, the newest record, the one behind it


@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_forked_reader_reads_only_what_is_new(more: int) -> None:
    async def fork(world: World) -> None:
        reader = await LogReader.open(process(world, "reader"), world.identity)
        async with world.producer("d") as producer:
            await feed(producer, more)
        worker = process(world, "worker")
        forked = await LogReader.continued(worker, world.identity, reader.knows)
        assert forked.knows == (await LogReader.open(process(world, "new"), world.identity)).knows
        assert forked.first_live_step == reader.first_live_step
        assert worker.counts.requests == 2 + BESIDE + CONFIRM + forked.state.version - reader.state.version

    small(fork, on=grow)


def test_going_on_costs_the_same_after_any_number_of_control_records() -> None:
    """Groups of a lake that nobody commits to: no commit names their records."""

    async def fork(world: World) -> list[int]:
        requests, made = [], GROWN
        record = (await LogReader.open(process(world, "reader"), world.identity)).control.record
        for count in (10, 2_500, 5_000):
            for number in range(made + 1, count):
                body = encode_control(
                    world.identity.lake_id, replace(record, record_id=number.to_bytes(RECORD_ID_BYTES))
                )
                world.shared.put(numbered(control_prefix(world.identity.lake_id), number), body)
            made = count - 1
            reader, worker = await LogReader.open(process(world, "reader"), world.identity), process(world, "worker")
            forked = await LogReader.continued(worker, world.identity, reader.knows)
            assert forked.control.number == made
            requests.append(worker.counts.requests)
        return requests

    assert small(fork, on=grow) == [2 + BESIDE + CONFIRM] * 3


@pytest.mark.parametrize("other", [False, True], ids=["shorter", "another history"])
def test_of_a_log_that_was_rolled_back_a_forked_reader_shows_nothing(other: bool) -> None:
    """From a copy of the store: the process before, or a worker beside this, has read the steps that were lost."""

    async def roll_back(world: World) -> None:
        before = await LogReader.open(process(world, "reader"), world.identity)
        old = dict(world.shared.objects)
        async with world.producer("d") as producer:
            await feed(producer, 2)
        known = (await LogReader.open(process(world, "reader"), world.identity)).state
        for key in set(world.shared.objects) - set(old):
            await process(world, "operator").delete([key])
        if other:  # just as long by now
            known = replace(known, version=before.state.version)
        with pytest.raises(OtherHistoryError, match="restart this process"):
            await LogReader.continued(process(world, "worker"), world.identity, known)
        forked = await LogReader.continued(process(world, "worker"), world.identity, before.state)
        assert forked.state == before.state

    small(roll_back, on=grow)


@scenario(small)
async def test_of_a_lake_without_a_commit_a_forked_reader_shows_the_first(world: World) -> None:
    known = (await LogReader.open(process(world, "reader"), world.identity)).state
    for count in (0, 1):
        async with world.producer("a") as producer:
            await feed(producer, count)
        forked = await LogReader.continued(process(world, "worker"), world.identity, known)
        assert forked.state == (await LogReader.open(process(world, "new"), world.identity)).state
    assert (await LogReader.continued(process(world, "worker"), world.identity, known)).state.next_step == 1


async def hazard_01_forked(world: World, store: ProcessStore) -> None:
    known = (await LogReader.open(process(world, "reader"), world.identity)).state
    await reaches_the_end(world, await LogReader.continued(store, world.identity, known))


def test_hazard_01_inside_every_await_of_going_on() -> None:
    assert inside_everywhere(grow, hazard_01_forked, zombies_everywhere, nothing) > 2
