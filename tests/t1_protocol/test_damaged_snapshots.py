"""Snapshots: when they are written, which of them may be damaged, and how much they hold."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial

import pytest
import trio
from crc32c import crc32c
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from long_lakes import lake_of, virtually
from producer_world import World, append, feed, simulate
from scenarios import scenario
from small_world import (
    NEED,
    SEGMENT,
    STEPS,
    audited,
    checkpoint,
    clean,
    grow,
    inside_everywhere,
    killed_everywhere,
    process,
    register,
    small,
)

from stepfs.errors import CorruptError, NewerFormatError, RefusedError, StepfsError
from stepfs.format.commit import Commit
from stepfs.format.ids import SEGMENT_STEPS, Step, Version
from stepfs.format.keys import log_prefix, number_of, numbered, snapshot_prefix
from stepfs.format.snapshot import REF_BYTES, LogState, decode_snapshot, encode_snapshot, genesis
from stepfs.lake.control import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import snapshot_due
from stepfs.store.api import Put
from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit import rebase

UNREADABLE = pytest.mark.logs("unreadable, using an older one")


def keys(world: World, prefix: str) -> list[str]:
    return sorted(key for key in world.shared.objects if key.startswith(prefix))


def snapshots(world: World) -> list[str]:
    return keys(world, snapshot_prefix(world.identity.lake_id))


def flip(shared: ObjectMap, key: str) -> None:
    body = bytearray(shared.objects[key])
    body[len(body) // 2] ^= 4
    shared.put(key, bytes(body))


async def to_the_end(world: World) -> None:
    """The trainer has consumed everything and a reclaim follows, twice: the shortest log there can be."""
    await grow(world)
    await checkpoint(world, "run", STEPS - 1)
    await clean(world)
    async with world.producer("d") as producer:
        await feed(producer, 2)
    await checkpoint(world, "run", len(world.ledger.steps))
    await clean(world)
    assert world.ledger.floor_version > 0


async def partial_log(world: World) -> None:
    """Some commits between the two snapshots that are left."""
    await grow(world)
    await checkpoint(world, "run", NEED)
    await clean(world)
    assert world.ledger.floor_version > 0


async def opens_as_it_was(world: World) -> LogReader:
    reader = await LogReader.open(process(world, "stranger"), world.identity)
    assert reader.state.digest == world.ledger.state.digest
    for step in range(reader.first_live_step, reader.state.next_step):
        world.ledger.check_entry("stranger", await reader.entry(Step(step)))
    assert not world.ledger.broken, world.ledger.broken
    return reader


@UNREADABLE
@scenario(small, on=to_the_end)
async def test_one_bit_of_the_format_version_is_damage_of_one_snapshot_as_well(world: World) -> None:
    """It reads like the version of a newer stepfs, but the checksum does not cover it, as a newer one's would."""
    for key in snapshots(world):
        whole = world.shared.objects[key]
        world.shared.put(key, whole[:7] + bytes([whole[7] ^ 32]) + whole[8:])
        await opens_as_it_was(world)
        world.shared.put(key, whole)
    for key in snapshots(world):
        whole = world.shared.objects[key]
        world.shared.put(key, whole[:7] + bytes([whole[7] ^ 32]) + whole[8:])
    with pytest.raises(CorruptError, match="no readable snapshot"):
        await LogReader.open(process(world, "stranger"), world.identity)


@UNREADABLE
@scenario(small, on=to_the_end)
async def test_snapshots_of_a_newer_stepfs_ask_for_an_upgrade(world: World) -> None:
    for key in snapshots(world):
        whole = world.shared.objects[key]
        header, body = whole[:7] + b"\3" + whole[8:12], whole[16:]
        world.shared.put(key, header + struct.pack("<I", crc32c(header + body)) + body)
    with pytest.raises(NewerFormatError, match="upgrade stepfs"):
        await LogReader.open(process(world, "stranger"), world.identity)


@UNREADABLE
@scenario(small, on=to_the_end)
async def test_any_one_snapshot_may_be_damaged_after_the_shortest_window(world: World) -> None:
    assert len(snapshots(world)) >= 2
    for key in snapshots(world):
        whole = world.shared.objects[key]
        flip(world.shared, key)
        await opens_as_it_was(world)
        world.shared.put(key, whole)
    flip(world.shared, snapshots(world)[-1])
    async with world.producer("a") as producer:
        await feed(producer, 12)
    assert world.ledger.published["a"] == 12
    await checkpoint(world, "run", len(world.ledger.steps))
    await clean(world)
    await opens_as_it_was(world)


@UNREADABLE
@scenario(small, on=to_the_end)
async def test_reclaim_goes_on_beside_a_damaged_snapshot_and_soon_there_are_two_again(world: World) -> None:
    flip(world.shared, snapshots(world)[-1])
    for _ in range(3):
        async with world.producer("a") as producer:
            await feed(producer, world.ledger.published["a"] + 3)
        await checkpoint(world, "run", len(world.ledger.steps))
        report = await clean(world)
        assert report.first_live_step == len(world.ledger.steps)
        await opens_as_it_was(world)
    newest = snapshots(world)[-1]
    flip(world.shared, newest)
    await opens_as_it_was(world)


async def reclaimed_again(world: World) -> None:
    """What was still on its way has landed; the newest snapshot rots."""
    await clean(world)
    await audited(world)
    flip(world.shared, snapshots(world)[-1])
    await opens_as_it_was(world)


@UNREADABLE
def test_two_are_left_wherever_a_reclaim_is_killed() -> None:
    assert killed_everywhere(grow, clean, reclaimed_again) > 50


@UNREADABLE
def test_two_are_left_whatever_another_reclaimer_does_at_any_await() -> None:
    async def further(world: World) -> None:
        await checkpoint(world, "run", STEPS - 1)
        await clean(world)

    assert inside_everywhere(grow, clean, further, reclaimed_again) > 50


@UNREADABLE
@scenario(small, on=partial_log)
async def test_a_log_that_ends_before_a_damaged_snapshot_is_no_shorter_log(world: World) -> None:
    """Its commit vanishes while the reader looks: only the damaged snapshot tells that there was more."""
    newest = snapshots(world)[-1]
    version = number_of(snapshot_prefix(world.identity.lake_id), newest)
    assert version is not None
    flip(world.shared, newest)
    store = process(world, "stranger")
    get = store.get
    looked: set[str] = set()

    async def loses(key: str, **options: int) -> bytes | None:
        """The commit answers when the snapshot is held against it, and is gone afterwards."""
        found = await get(key, **options)
        if key == world.ledger.head_key(version) and key not in looked:
            looked.add(key)
            for lost in keys(world, log_prefix(world.identity.lake_id)):
                if lost >= world.ledger.head_key(version - 1):
                    world.shared.remove(lost)
        return found

    store.get = loses  # type: ignore[method-assign]
    with pytest.raises(CorruptError, match=f"log version {version - 1} is missing, and the snapshot"):
        await LogReader.open(store, world.identity)


@UNREADABLE
@scenario(small, on=partial_log)
async def test_a_hole_in_the_log_behind_a_damaged_snapshot_is_no_end_of_the_log(world: World, monkeypatch) -> None:
    """A producer that took the slot of the lost commit would begin a second history. No commit carries it."""
    monkeypatch.setattr("stepfs.lake.log.reader.carriers_of", lambda _: [])
    newest = snapshots(world)[-1]
    version = number_of(snapshot_prefix(world.identity.lake_id), newest)
    assert version is not None
    log = keys(world, log_prefix(world.identity.lake_id))
    lost = world.ledger.head_key(version - 1)
    flip(world.shared, newest)
    world.shared.remove(lost)
    with pytest.raises(CorruptError, match=f"log version {version - 1} is missing"):
        await LogReader.open(process(world, "stranger"), world.identity)
    with pytest.raises(CorruptError, match="is missing"):
        async with world.producer("a") as producer:
            await feed(producer, 12)
    assert keys(world, log_prefix(world.identity.lake_id)) == [key for key in log if key != lost]


@scenario(small, on=partial_log)
async def test_a_commit_that_a_snapshot_covers_may_be_damaged(world: World) -> None:
    """The commit after it names the same digest."""
    newest = number_of(snapshot_prefix(world.identity.lake_id), snapshots(world)[-1])
    assert newest is not None
    async with world.producer("d") as producer:
        await feed(producer, 1)
    if world.ledger.state.version > newest:
        flip(world.shared, world.ledger.head_key(newest))
    await opens_as_it_was(world)


async def window(steps: int) -> tuple[int, int, int]:
    """Requests of opening after a reclaim of all but the last step; then of the reclaim, and snapshots left."""
    lake = await lake_of(steps)
    store = lake.store("reclaimer")
    group = Group.of(store, lake.identity, "run", TrioClock())
    await group.add(Step(steps - 1))
    before = store.counts.requests
    await reclaim(store, lake.identity, clock=TrioClock())
    reclaimed = store.counts.requests - before
    reader = lake.store("reader")
    await LogReader.open(reader, await open_lake(reader))
    kept = len(await store.list(snapshot_prefix(lake.identity.lake_id)))
    return reader.counts.requests, reclaimed, kept


def test_opening_costs_what_it_cost_with_one_snapshot() -> None:
    """Two LISTs of snapshots, the newest with its commit, the identity, a LIST of the log, three requests for the newest
    control record: nothing for the second.
    """
    requests, _, kept = virtually(partial(window, 3 * SEGMENT_STEPS + 5))
    assert kept >= 2
    assert requests == 9


@scenario(small, on=partial_log)
async def test_a_new_group_never_needs_what_only_the_kept_log_names(world: World) -> None:
    """The log reaches further back than the live steps; what is below the first live step stays given up."""
    await register(world, "late")
    assert world.ledger.promises["late"] == world.ledger.first_live_step
    await audited(world)


class SlowSnapshots(FaultyStore):
    """Each of its snapshots takes `snapshot_s` before it arrives."""

    snapshot_s = 0.0

    async def create(self, key: str, body: bytes) -> Put:
        if "/snapshot/" in key:
            await trio.sleep(self.snapshot_s)
        return await super().create(key, body)


def slow(world: World, seconds: float) -> SlowSnapshots:
    store = SlowSnapshots(world.shared, actor="p")
    store.snapshot_s = seconds
    return store


def snapshots_of(world: World) -> list[int | None]:
    prefix = snapshot_prefix(world.identity.lake_id)
    return [number_of(prefix, key) for key in sorted(world.shared.objects) if key.startswith(prefix)]


def state(version: int, steps: int = 0) -> LogState:
    refs = bytes(REF_BYTES * (steps // SEGMENT_STEPS))
    return replace(genesis("0" * 32, 1), version=Version(version), next_step=Step(steps), segment_refs=refs)


@pytest.mark.parametrize(
    ("before", "after", "is_due"), [
        (state(5, 511), state(6, 512), True), (state(5, 500), state(6, 1100), True),
        (state(5, 512), state(6, 1023), False), (state(1022), state(1023), False), (state(1023), state(1024), True),
        (state(1024), state(1025), False), (state(-1), state(0), False),
    ],
)  # fmt: skip
def test_a_snapshot_is_due_after_each_segment_and_each_1024_versions(before: LogState, after: LogState, is_due):
    assert snapshot_due(before, after) is is_due


async def commit(world: World, store: FaultyStore, segments: int) -> list[float]:
    """One producer, one commit a step; the seconds that each took."""
    took = []
    async with world.producer("p", store) as producer:
        for number in range(SEGMENT * segments):
            began_s = trio.current_time()
            await append(producer, number)
            await producer.flush()
            took.append(trio.current_time() - began_s)
    return took


@scenario(small)
async def test_commits_wait_for_no_snapshot_and_of_those_that_wait_the_newest_is_written(world: World):
    """With an epoch commit in front, steps 3, 7 and 11 fill segments as versions 4, 8 and 12, while 4 is under way."""
    assert max(await commit(world, slow(world, 10.0), 3)) < 1.0
    assert snapshots_of(world) == [4, 12]
    reader = await LogReader.open(world.store("reader"), world.identity)
    for step in range(3 * SEGMENT):
        world.ledger.check_entry("reader", await reader.entry(Step(step)))
    assert not world.ledger.broken, world.ledger.broken


@pytest.mark.parametrize(("snapshot_s", "waits_s"), [(20.0, 20.0), (100.0, 30.0)])
@scenario(small)
async def test_an_end_waits_half_a_minute_for_a_snapshot(world: World, snapshot_s, waits_s):
    async with world.producer("p", slow(world, snapshot_s)) as producer:
        await feed(producer, SEGMENT)
        await producer.flush()
        began_s = trio.current_time()
    assert trio.current_time() - began_s == pytest.approx(waits_s, abs=0.5)
    assert len(snapshots_of(world)) == (snapshot_s == waits_s)


@scenario(small)
async def test_the_next_producer_at_a_boundary_makes_up_for_a_missing_snapshot(world: World) -> None:
    """One is killed between its commit and its snapshot; the other writes the segment of both."""
    with trio.CancelScope() as killed:
        async with world.producer("p", slow(world, 1000.0)) as producer:
            await feed(producer, SEGMENT + 1)
            await producer.flush()
            killed.cancel()
            await trio.sleep_forever()
    assert snapshots_of(world) == []
    async with world.producer("q") as producer:
        await feed(producer, SEGMENT)
    assert snapshots_of(world)
    from_snapshot = ObjectMap()
    for key, body in world.shared.objects.items():
        if "/log/" not in key or key >= world.ledger.head_key(snapshots_of(world)[-1] or 0):
            from_snapshot.put(key, body)
    reader = await LogReader.open(FaultyStore(from_snapshot), world.identity)
    for step in range(2 * SEGMENT + 1):
        world.ledger.check_entry("reader", await reader.entry(Step(step)))
    assert not world.ledger.broken, world.ledger.broken


POSITION_BYTES = 1000


async def read(world: World) -> LogState:
    return (await LogReader.open(world.store("reader"), world.identity)).state


async def publish(world: World, who: str, *positions: object) -> None:
    async with world.producer(who) as producer:
        for position in positions:
            await producer.append([b"a", b"b"], position=position)


@scenario(simulate)
async def test_a_lake_whose_totals_are_full_refuses_appends_and_stays_readable(world: World, monkeypatch):
    await publish(world, "a", 1, 2, 3)
    before = await read(world)
    monkeypatch.setattr(rebase, "TOTAL_MAX", before.total_bytes + 1)
    with pytest.raises(RefusedError, match="the lake is full") as refused:
        await publish(world, "a", 4)
    assert refused.value.exit_code == 4
    after = await read(world)
    assert (after.next_step, after.total_bytes) == (before.next_step, before.total_bytes)
    assert after.producers["a"].next_seq == 3


@scenario(simulate)
async def test_positions_that_grow_are_refused_before_no_snapshot_can_hold_them(world: World, monkeypatch):
    monkeypatch.setattr(rebase, "POSITIONS_BYTES_MAX", 5 * POSITION_BYTES)
    monkeypatch.setattr(rebase, "POSITION_BYTES_MAX", POSITION_BYTES + 10)
    for number in range(8):  # all join while there is room
        await publish(world, f"p{number}", b"")
    for number in range(4):
        await publish(world, f"p{number}", b"x" * POSITION_BYTES)
    with pytest.raises(RefusedError, match=r"producer 'p4': a position of 1003 bytes does not fit"):
        await publish(world, "p4", 7, b"x" * POSITION_BYTES)
    await publish(world, "p0", b"y" * POSITION_BYTES)  # those that do not grow go on
    await publish(world, "p4", b"z")
    state = await read(world)
    assert sum(len(producer.position) for producer in state.producers.values()) <= 5 * POSITION_BYTES
    assert decode_snapshot(encode_snapshot(state), "snapshot") == state
    await Group.of(world.store("run"), world.identity, "run", TrioClock()).add(Step(state.next_step))
    report = await reclaim(world.store("reclaim"), world.identity)
    assert report.first_live_step == state.next_step
    assert (await read(world)).producers == state.producers


@scenario(simulate)
async def test_a_lake_that_is_beyond_the_limit_lets_positions_stay_and_shrink(world: World, monkeypatch):
    for number in range(6):
        await publish(world, f"p{number}", b"x" * POSITION_BYTES)
    monkeypatch.setattr(rebase, "POSITIONS_BYTES_MAX", POSITION_BYTES)
    monkeypatch.setattr(rebase, "POSITION_BYTES_MAX", POSITION_BYTES + 10)
    await publish(world, "p0", b"y" * POSITION_BYTES)
    await publish(world, "p1", b"y")
    with pytest.raises(RefusedError, match="smaller positions"):
        await publish(world, "p1", b"y" * 900)
    assert (await read(world)).next_step == 8


@pytest.mark.parametrize("wrong", [{"total_records": 1 << 50}, {"time_ms": 1 << 54}, {"first_step": Step(9)}])
@scenario(simulate)
async def test_a_writer_that_is_wrong_writes_nothing(world: World, monkeypatch, wrong):
    sound = commit_loop.rebase  # type: ignore[attr-defined]

    def broken(*arguments: object) -> object:
        made = sound(*arguments)  # type: ignore[arg-type]
        return replace(made, **wrong) if isinstance(made, Commit) else made  # type: ignore[arg-type]

    async with world.producer("a") as producer:
        await feed(producer, 2)
    before = await read(world)
    monkeypatch.setattr(commit_loop, "rebase", broken)
    with pytest.raises(StepfsError, match="is not written"):
        async with world.producer("a") as producer:
            await append(producer, 2)
    epoch = before.version + 1
    assert (await read(world)).version == epoch
    slot = numbered(log_prefix(world.identity.lake_id), epoch + 1)
    assert await world.store("reader").get(slot) is None
    monkeypatch.setattr(commit_loop, "rebase", sound)
    async with world.producer("a") as producer:
        await feed(producer, 5)
    world.check(a=5)
