"""One damaged snapshot costs nobody the lake: two are kept, and the log from the older one on.

Whoever falls back accepts nothing that the chain does not confirm, and never a log that ends early.
"""

from __future__ import annotations

import struct
from functools import partial

import pytest
from crc32c import crc32c
from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from producer_world import World, feed
from scenarios import scenario
from small_world import (
    NEED,
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
from test_growth import lake_of, virtually

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.format.keys import log_prefix, number_of, snapshot_prefix
from stepfs.lake.control import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader

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
async def test_a_hole_in_the_log_behind_a_damaged_snapshot_is_no_end_of_the_log(world: World) -> None:
    """A producer that took the slot of the lost commit would begin a second history."""
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
