"""A reclaim that is killed, raced, tried dry, out of luck, or idle: it leaves what is needed, and costs little."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
import trio
from cluster_world import SkewedClock
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from long_lakes import MANY, Lake, lake_of, virtually
from process_store import ProcessStore
from producer_world import World, feed
from scenarios import scenario
from small_world import (
    NEED,
    SEGMENT,
    STEPS,
    TOTALS,
    audited,
    checkpoint,
    clean,
    group,
    grow,
    grown_and_littered,
    inside_everywhere,
    killed_everywhere,
    litter,
    move_on,
    process,
    register,
    small,
)

from stepfs.errors import CorruptError, OtherHistoryError, ReclaimedError, RefusedError, WithdrawnError
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step
from stepfs.format.keys import (
    LAKE,
    extent,
    index_prefix,
    log_prefix,
    numbered,
    plan_key,
    snapshot_prefix,
    source_listing_key,
)
from stepfs.format.snapshot import decode_snapshot
from stepfs.lake.control import Group
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim import run as run_room
from stepfs.lake.reclaim.run import CountingRemover, Reclaimer, Report
from stepfs.lake.verify.data import verify_lake
from stepfs.lake.verify.metadata import verify_metadata
from stepfs.store.api import Entry, Put


async def cleaned(world: World) -> None:
    await clean(world)
    await audited(world)
    assert world.ledger.first_live_step == NEED


@scenario(small, on=grown_and_littered)
async def test_one_reclaim_leaves_exactly_what_is_needed(world: World) -> None:
    report = await clean(world)
    await audited(world)
    assert (report.first_live_step, report.floor) == (NEED, world.ledger.floor_version)
    assert report.floor > 0
    assert report.deleted_objects > NEED
    again = await clean(world)
    assert (again.deleted_objects, again.deleted_bytes) == (0, 0)


def test_a_reclaim_killed_at_any_await_is_finished_by_the_next() -> None:
    assert killed_everywhere(grown_and_littered, clean, cleaned) > 60


async def grown_with_one_old_snapshot(world: World) -> None:
    """The snapshots are lost, but for the first and those behind the need: all between is dead, by its segments alone."""
    await grown_and_littered(world)
    prefix = snapshot_prefix(world.identity.lake_id)
    states = {key: decode_snapshot(body, key) for key, body in world.shared.objects.items() if key.startswith(prefix)}
    below = sorted(key for key, state in states.items() if state.next_step <= NEED)
    assert states[below[0]].next_step < 2 * SEGMENT <= states[below[-1]].next_step
    for key in below[1:]:
        world.shared.remove(key)


def test_a_snapshot_below_the_cut_may_name_segments_that_a_killed_reclaimer_has_deleted() -> None:
    """Data goes before its segment: what is gone with it has no step left to look for."""
    assert killed_everywhere(grown_with_one_old_snapshot, clean, cleaned) > 60


def test_a_group_may_come_back_after_a_reclaimer_was_killed() -> None:
    """It either has its steps for good or is told at once that it is too late; then reclaim goes on."""

    async def comes_back(world: World) -> None:
        try:
            await checkpoint(world, "run", 2, keep=None)
        except WithdrawnError:
            assert world.ledger.first_live_step > 2, "only what is gone is refused"
        await register(world, "late")
        await clean(world)
        await checkpoint(world, "late", STEPS)
        await checkpoint(world, "run", NEED)
        await cleaned(world)

    killed_everywhere(grown_and_littered, clean, comes_back)


def test_a_group_writer_killed_at_any_await_never_loses_steps() -> None:
    """What it may have left behind is a need that is honoured, or one that is reported; raising it goes on."""

    async def goes_back(world: World, store: ProcessStore) -> None:
        with pytest.raises(WithdrawnError):
            await checkpoint(world, "run", NEED - 1, store, keep=None)

    async def given_up(world: World) -> None:
        await grown_and_littered(world)
        await clean(world)

    async def raised(world: World) -> None:
        await checkpoint(world, "run", NEED + 1)
        await clean(world)
        await audited(world)
        assert world.ledger.first_live_step == NEED + 1

    killed_everywhere(given_up, goes_back, raised)


def test_another_reclaimer_at_any_await() -> None:
    """All of a second reclaim happens inside each await of the first."""
    assert inside_everywhere(grown_and_littered, clean, clean, cleaned) > 60


def test_a_reclaimer_that_is_further_at_any_await() -> None:
    """The trainer moves on and another reclaimer deletes beyond what the first has planned, even the log it reads."""

    async def further(world: World) -> None:
        await checkpoint(world, "run", STEPS - 1)
        await clean(world)

    async def at_the_end(world: World) -> None:
        await clean(world)
        await audited(world)
        assert world.ledger.first_live_step == STEPS - 1

    inside_everywhere(grown_and_littered, clean, further, at_the_end)


@scenario(small, on=grown_and_littered)
async def test_what_another_deletes_behind_the_second_look_is_no_damage(world: World, monkeypatch) -> None:
    """Both looks began at one control record; but by the end of the second there was a newer one."""
    reclaimer = Reclaimer(process(world, "slow"), world.identity, clock=TrioClock())
    rounds, whole = iter((False, True)), Reclaimer._round

    async def finds_a_segment_gone(self: Reclaimer, **options: bool) -> Report | None:
        moves = next(rounds, None)
        if moves is None:
            return await whole(self, **options)
        await self._followed()
        if moves:
            await checkpoint(world, "run", NEED + 2)
            await clean(world)
        raise CorruptError("index segment is missing")

    monkeypatch.setattr(Reclaimer, "_round", finds_a_segment_gone)
    assert (await reclaimer.run()).first_live_step == NEED + 2
    rounds = iter((False, False))
    with pytest.raises(CorruptError, match="segment is missing"):
        await reclaimer.run()


GRACE_S = 100.0


async def everything(world: World) -> None:
    """Objects of every kind that a reclaim finds, needed and not."""
    await register(world, "late")
    await grow(world)
    await litter(world)
    world.ledger.release("late")
    await trio.sleep(2 * GRACE_S)
    await checkpoint(world, "late", NEED + 1)
    await checkpoint(world, "run", NEED)
    await trio.sleep(2 * GRACE_S)


def kinds(world: World, keys: set[str]) -> Counter[str]:
    return Counter(key.removeprefix(f"{world.identity.lake_id}/").partition("/")[0] for key in keys)


async def planned(world: World, patch: pytest.MonkeyPatch) -> tuple[Report, set[str]]:
    """What a dry run reports, and the objects that it has counted."""
    named: set[str] = set()

    class Watched(CountingRemover):
        async def remove(self, entries: Sequence[Entry]) -> None:
            assert not named & {entry.key for entry in entries}, "counted twice"
            named.update(entry.key for entry in entries)
            await super().remove(entries)

    with patch.context() as inside:
        inside.setattr("stepfs.lake.reclaim.run.CountingRemover", Watched)
        report = await reclaim(process(world, "dry"), world.identity, dry_run=True, clock=TrioClock(), grace_s=GRACE_S)
    return report, named


async def compare(world: World, patch: pytest.MonkeyPatch) -> Counter[str]:
    """A dry run, and the run; returns how many objects of each kind went."""
    before, requests = dict(world.shared.objects), len(world.shared.trace)
    plan, named = await planned(world, patch)
    assert {event.verb for event in world.shared.trace[requests:]} == {"get", "list"}
    done = await reclaim(process(world, "real"), world.identity, clock=TrioClock(), grace_s=GRACE_S)
    gone = before.keys() - world.shared.objects.keys()
    assert named == gone
    assert plan == done
    assert (plan.deleted_objects, plan.deleted_bytes) == (len(gone), sum(len(before[key]) for key in gone))
    return kinds(world, set(gone))


@scenario(small)
async def test_a_dry_run_names_every_object_that_the_run_deletes(world: World, monkeypatch):
    await everything(world)
    went = await compare(world, monkeypatch)
    assert went.keys() == {"data", "index", "log", "snapshot"}
    assert not await compare(world, monkeypatch), "and nothing is left"


@scenario(small)
async def test_a_dry_run_knows_what_a_killed_reclaimer_left(world: World, monkeypatch):
    """Killed in the middle of deleting: the floor says so already, data, index, log and snapshots are partly there."""
    await everything(world)
    kept = dict(world.shared.objects)
    await clean(world)
    lake_id = world.identity.lake_id
    for key in (
        extent(index_prefix(lake_id), SegmentIndex(NEED // SEGMENT - 1)),
        numbered(log_prefix(lake_id), 2),
        *sorted(key for key in kept if key.startswith(snapshot_prefix(lake_id)))[:1],
        *sorted(key for key in kept if "/data/" in key and key not in world.shared.objects)[:3],
    ):
        world.shared.put(key, kept[key])
    went = await compare(world, monkeypatch)
    assert went.keys() >= {"index", "log", "snapshot"}


@scenario(small)
async def test_a_dry_run_writes_no_snapshot_that_the_run_needs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await everything(world)
    for key in [key for key in world.shared.objects if key.startswith(snapshot_prefix(world.identity.lake_id))]:
        world.shared.remove(key)
    await compare(world, monkeypatch)


@scenario(small)
async def test_a_dry_run_on_a_sealed_lake(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await everything(world)
    await seal(await LogReader.open(process(world, "sealer"), world.identity), TrioClock())
    await compare(world, monkeypatch)


@scenario(small)
async def test_a_dry_run_that_counted_otherwise_would_be_found(world: World, monkeypatch):
    """The mutant: what the run deletes goes unsaid."""
    remove = CountingRemover.remove

    async def unsaid(remover: CountingRemover, entries: Sequence[Entry]) -> None:
        if remover._store is not None:
            await remove(remover, entries)

    monkeypatch.setattr(run_room.CountingRemover, "remove", unsaid)
    await everything(world)
    with pytest.raises(AssertionError):
        await compare(world, monkeypatch)


DAY_S = 86_400.0
HOUR_S = 3600.0
LAST = STEPS - 1


@pytest.mark.parametrize("trainers_s", [-DAY_S, 0.0, DAY_S])
@pytest.mark.parametrize("reclaimers_s", [-DAY_S, DAY_S])
@scenario(small, on=grow)
async def test_grace_is_by_the_stores_clock_however_wrong_the_others_are(world: World, trainers_s, reclaimers_s):
    clock = SkewedClock(reclaimers_s)
    reclaimer = Reclaimer(process(world, "patient"), world.identity, clock=clock, grace_s=HOUR_S)
    await trio.sleep(DAY_S)
    assert (await reclaimer.run()).first_live_step == NEED
    trainer = Group.of(process(world, "trainer"), world.identity, "run", SkewedClock(trainers_s))
    world.ledger.promises["run"] = LAST
    await trainer.add(Step(LAST), keep=1)
    await trio.sleep(HOUR_S - 60)
    assert (await reclaimer.run()).first_live_step == NEED
    await trio.sleep(120)
    assert (await reclaimer.run()).first_live_step == LAST


@scenario(small, on=grow)
async def test_what_one_that_may_not_delete_has_given_up_another_deletes(world: World) -> None:
    store = process(world, "no right")

    async def forbidden(keys: list[str]) -> None:
        raise RefusedError(f"cannot delete {keys[0]}")

    store.delete = forbidden  # type: ignore[method-assign,assignment]
    for _ in range(2):
        with pytest.raises(RefusedError, match="cannot delete"):
            await clean(world, store)
    assert world.ledger.first_live_step == NEED
    assert (await clean(world)).deleted_objects > 0
    await checkpoint(world, "run", LAST)
    await clean(world)
    await audited(world)


async def made_again(world: World) -> dict[str, bytes]:
    """Drop the lake and make another at its place. Returns the new one's objects."""
    world.shared.watch = None
    store = process(world, "operator")
    await store.delete([entry.key for entry in await store.list("")])
    new = await create_lake(store, slices=world.identity.grid, clock=TrioClock())
    await Group.of(store, new, "run", TrioClock()).add(Step(0))
    return {key: body for key, body in world.shared.objects.items() if key == LAKE or new.lake_id in key}


@scenario(small, on=grow)
async def test_who_knew_a_dropped_lake_does_nothing_to_the_one_that_was_made_in_its_place(world: World):
    """What is recorded for the old lake lies under the old lake's id, where nobody looks."""
    reclaimer = Reclaimer(process(world, "old"), world.identity, clock=TrioClock())
    await reclaimer.run()
    old = group(world, "run")
    await old.read()
    new = await made_again(world)
    with pytest.raises(OtherHistoryError, match="restart this process"):
        await old.add(Step(LAST), keep=1)
    for orphans in (False, True):
        assert not (await reclaimer.run(orphans=orphans)).deleted_objects
    assert {key: world.shared.objects[key] for key in new} == new
    assert all(world.identity.lake_id in key for key in world.shared.objects.keys() - new.keys())


async def first_unloaded(world: World) -> tuple[LogReader, Step]:
    reader = await LogReader.open(process(world, "reader"), world.identity)
    live = range(reader.first_live_step, reader.state.sealed_steps)
    return reader, next(step for step in map(Step, live) if reader.entry_if_loaded(step) is None)


@scenario(small, on=grow)
async def test_it_is_told_that_the_step_was_reclaimed(world: World) -> None:
    """Seed 675949478: it was told that the lake is damaged and what to restore."""
    reader, step = await first_unloaded(world)
    await move_on(world)
    with pytest.raises(ReclaimedError, match="were reclaimed"):
        await reader.entry(step)
    await reader.poll()


@scenario(small, on=grow)
async def test_a_segment_that_is_missing_above_the_floor_is_damage(world: World) -> None:
    reader, step = await first_unloaded(world)
    world.shared.remove(extent(index_prefix(world.identity.lake_id), SegmentIndex(step // SEGMENT)))
    with pytest.raises(CorruptError, match="index segment is missing"):
        await reader.entry(step)


DIGEST = "0123456789abcdef" * 2


@scenario(small, on=grow)
async def test_listings_and_plans_survive_a_reclaim_and_are_no_damage(world: World) -> None:
    await litter(world)
    store, identity = process(world, "keeper"), world.identity
    kept = {
        source_listing_key(identity.lake_id, DIGEST, 0): b"files",
        source_listing_key(identity.lake_id, DIGEST, 1): b"more",
        plan_key(identity.lake_id, DIGEST): b"version: 1",
    }
    for key, data in kept.items():
        assert await store.create(key, data) is Put.CREATED
    await register(world, "other")
    await checkpoint(world, "other", 12)
    for _ in range(2):
        await reclaim(store, identity, clock=TrioClock(), orphans=True)
    for key, data in kept.items():
        assert await store.get(key) == data
    reader = await LogReader.open(store, identity)
    assert not (await verify_lake(reader, origins=OriginStores(store, lambda _: store))).errors
    assert not await verify_metadata(store, identity)
    child = FaultyStore(ObjectMap(), actor="child")
    await fork(reader, child, Cut(reader.first_live_step, reader.first_live_step, reader.first_live_step), TrioClock())
    forked = (await open_lake(child)).lake_id
    for key, data in kept.items():
        assert await child.get(key.replace(identity.lake_id, forked)) == data, "a run goes on in the fork"


async def another_history(world: World) -> None:
    for until in (3, 3):
        async with world.producer("a") as producer:
            await feed(producer, TOTALS["a"] + until)


@scenario(small, on=grow)
async def test_a_reclaimer_under_which_the_lake_was_restored_deletes_nothing_live(world: World) -> None:
    reclaimer = Reclaimer(process(world, "old"), world.identity, clock=TrioClock())
    before, ledger = dict(world.shared.objects), world.ledger.onto(world.shared)
    world.shared.watch = world.ledger._watch
    async with world.producer("b") as producer:
        await feed(producer, TOTALS["b"] + 5)
    await reclaimer.run(dry_run=True)
    await reclaimer.run(dry_run=False)
    for key in set(world.shared.objects) - set(before):
        world.shared.remove(key)
    for key, body in before.items():
        world.shared.put(key, body)
    world.ledger = ledger
    world.shared.watch = ledger._watch
    await another_history(world)
    await reclaimer.run()
    assert not ledger.broken, ledger.broken


GROUPS = 3


def paged(lake: Lake, actor: str) -> FaultyStore:
    """As S3 counts: a LIST shows 1,000 names."""
    return FaultyStore(lake.shared, actor=actor, latency=lambda _verb, _size, _rng: 0.001, page=1000)


async def grouped(steps: int, needs: Sequence[int]) -> Lake:
    lake = await lake_of(steps)
    for number, need in enumerate(needs):
        await Group.of(paged(lake, "trainer"), lake.identity, f"g{number}", TrioClock()).add(Step(need))
    return lake


async def idle(steps: int) -> tuple[int, int]:
    """Requests of the second and of the tenth run of a `--every`, after the first has advanced."""
    lake = await grouped(steps, [steps // 2 + number for number in range(GROUPS)])
    store = paged(lake, "reclaimer")
    reclaimer = Reclaimer(store, lake.identity, clock=TrioClock())
    assert (await reclaimer.run()).first_live_step == steps // 2
    costs = []
    for _ in range(10):
        before = store.counts.requests
        assert (await reclaimer.run()).deleted_objects == 0
        costs.append(store.counts.requests - before)
    return costs[0], costs[-1]


def test_an_idle_run_costs_two_requests_at_any_length() -> None:
    """The next version of the log and the next control record; `--every` reads lake.msgpack besides."""
    assert virtually(partial(idle, 100)) == virtually(partial(idle, MANY)) == (2, 2)


async def timer(steps: int) -> list[int]:
    """Requests of runs that are a new process each, as by a timer, on a lake that an earlier run has left clean."""
    lake = await grouped(steps, [steps // 2 // SEGMENT_STEPS * SEGMENT_STEPS])
    await reclaim(paged(lake, "first"), lake.identity, clock=TrioClock(), grace_s=HOUR_S)
    await trio.sleep(2 * HOUR_S)
    await reclaim(paged(lake, "second"), lake.identity, clock=TrioClock(), grace_s=HOUR_S)
    costs = []
    for number in range(3):
        store = paged(lake, f"timer {number}")
        assert (await run_once(store)).deleted_objects == 0
        costs.append(store.counts.requests)
    return costs


async def run_once(store: FaultyStore) -> Report:
    """As `stepfs reclaim` does: the identity too."""
    return await reclaim(store, await open_lake(store), clock=TrioClock(), grace_s=HOUR_S)


def test_an_idle_run_of_a_new_process_costs_a_request_per_thousand_live_steps_and_one_per_segment() -> None:
    """Beside the 15 that the beginning costs at any length, it looks for orphans among all that is live."""
    for segments in (4, 12):
        live = segments * SEGMENT_STEPS // 2 + 1
        costs = virtually(partial(timer, segments * SEGMENT_STEPS + 1))
        assert max(costs) <= 15 + -(-live // 1000) + -(-live // SEGMENT_STEPS), costs
        assert len(set(costs)) == 1


def peak_bytes(steps: int) -> int:
    """What reclaiming almost all of a lake, orphans looked for, takes at most beside the store's own objects."""

    async def main() -> int:
        lake = await grouped(steps, [steps - SEGMENT_STEPS])
        lake.shared.watch = None
        store = paged(lake, "reclaimer")
        tracemalloc.start()
        try:
            await reclaim(store, lake.identity, clock=TrioClock(), orphans=True)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return virtually(main)


def test_memory_does_not_grow_with_what_goes() -> None:
    short, long = peak_bytes(3 * SEGMENT_STEPS), peak_bytes(6 * SEGMENT_STEPS)
    assert long < 16 << 20
    assert long < 1.4 * short
