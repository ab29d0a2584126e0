"""Who writes which snapshot, when, and what a commit, or the end of a producer, waits for. Segments of four steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from producer_world import World, append, feed
from scenarios import scenario
from small_world import SEGMENT, small

from stepfs.format.ids import SEGMENT_STEPS, Step, Version
from stepfs.format.keys import number_of, snapshot_prefix
from stepfs.format.snapshot import REF_BYTES, LogState, genesis
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import snapshot_due
from stepfs.store.api import Put


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


def snapshots(world: World) -> list[int | None]:
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
    assert snapshots(world) == [4, 12]
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
    assert len(snapshots(world)) == (snapshot_s == waits_s)


@scenario(small)
async def test_the_next_producer_at_a_boundary_makes_up_for_a_missing_snapshot(world: World) -> None:
    """One is killed between its commit and its snapshot; the other writes the segment of both."""
    with trio.CancelScope() as killed:
        async with world.producer("p", slow(world, 1000.0)) as producer:
            await feed(producer, SEGMENT + 1)
            await producer.flush()
            killed.cancel()
            await trio.sleep_forever()
    assert snapshots(world) == []
    async with world.producer("q") as producer:
        await feed(producer, SEGMENT)
    assert snapshots(world)
    from_snapshot = ObjectMap()
    for key, body in world.shared.objects.items():
        if "/log/" not in key or key >= world.ledger.head_key(snapshots(world)[-1] or 0):
            from_snapshot.put(key, body)
    reader = await LogReader.open(FaultyStore(from_snapshot), world.identity)
    for step in range(2 * SEGMENT + 1):
        world.ledger.check_entry("reader", await reader.entry(Step(step)))
    assert not world.ledger.broken, world.ledger.broken
