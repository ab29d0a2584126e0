"""What the index costs a reader that jumps: one small read a step, and never other entries than the segment's."""

from __future__ import annotations

import random

import pytest
import trio
from deterministic import scaled
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from scenarios import scenario
from test_growth import generator, virtually

from stepfs.errors import RefusedError
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, SliceIndex, Step
from stepfs.format.keys import entries_prefix, extent, index_prefix
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.lone_entries import SEGMENT_SHARE_BYTES, LoneEntries
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Counts, Put
from stepfs_producer import AsyncProducer

SEGMENTS = 6
STEPS = SEGMENTS * SEGMENT_STEPS + 5


async def long_lake(slices: int) -> ObjectMap:
    shared = ObjectMap()
    module = generator()
    module.open_store = lambda url, endpoint_url: FaultyStore(shared)  # type: ignore[attr-defined]
    await module.make("memory://", None, STEPS, slices, 64)
    return shared


async def follow(shared: ObjectMap, *, actor: str = "reader") -> tuple[FaultyStore, LogReader]:
    store = FaultyStore(shared, actor=actor)
    reader = await LogReader.open(store, await open_lake(store))
    store.counts = Counts(keys=[])
    return store, reader


async def same(reader: LogReader, shared: ObjectMap, step: int) -> bool:
    """Whether the reader has of a step what a stranger reads from its whole segment."""
    _, stranger = await follow(shared, actor="stranger")
    return reader.entry_if_loaded(Step(step)) == await stranger.entry(Step(step))


@pytest.mark.parametrize("slices", [1, 64, 256])
@scenario(virtually)
async def test_a_step_opened_out_of_order_costs_one_small_read(slices: int) -> None:
    shared = await long_lake(slices)
    store, reader = await follow(shared)
    for step in (700, 2000, 40, 1300, 120):
        requests, read = store.counts.requests, store.counts.bytes_read
        await reader.lone_entry(Step(step))
        assert store.counts.requests - requests == 1
        assert store.counts.bytes_read - read <= 24 * slices + 600
        assert await same(reader, shared, step)
        await reader.lone_entry(Step(step))
        assert store.counts.requests - requests == 1, "it is kept"


@scenario(virtually)
async def test_a_scan_costs_its_first_step_and_then_whole_segments() -> None:
    store, reader = await follow(await long_lake(4))
    for step in range(600, 1100):
        await reader.lone_entry(Step(step))
    assert store.counts.requests <= 4


@scenario(virtually)
async def test_random_order_ends_with_whole_segments_and_never_costs_more_than_its_share() -> None:
    store, reader = await follow(await long_lake(4))
    order = list(range(SEGMENTS * SEGMENT_STEPS))
    random.Random(3).shuffle(order)
    for count, step in enumerate(order, start=1):
        await reader.lone_entry(Step(step))
        whole = sum(key.split("/")[1] == "index" for _, key in store.counts.keys or ())
        assert store.counts.bytes_read <= SEGMENT_SHARE_BYTES * (count + 8 * SEGMENTS)
        assert store.counts.requests - whole <= count
    assert whole == SEGMENTS, "each once"
    assert store.counts.requests < len(order) / 10


@scenario(virtually)
async def test_where_segments_displace_each_other_steps_stay_alone() -> None:
    store, reader = await follow(await long_lake(4))
    reader.segments.limit(0)  # four are kept all the same
    order = list(range(0, SEGMENTS * SEGMENT_STEPS, 4)) * 2
    random.Random(3).shuffle(order)
    for step in order:
        await reader.lone_entry(Step(step))
    whole = [key for _, key in store.counts.keys or () if key.split("/")[1] == "index"]
    assert len(whole) == len(set(whole)) <= 4


@scenario(virtually)
async def test_a_lake_of_an_older_stepfs_is_read_by_segments() -> None:
    shared = await long_lake(4)
    lake_id = (await open_lake(FaultyStore(shared))).lake_id
    for key in [key for key in shared.objects if key.startswith(entries_prefix(lake_id))]:
        shared.remove(key)
    store, reader = await follow(shared)
    for step in (700, 2000, 710):
        await reader.lone_entry(Step(step))
        assert await same(reader, shared, step)
    assert store.counts.requests == 4, "one look, and one segment, each"


def spoil_checksum(key: str, shared: ObjectMap) -> bytes:
    return bytes(byte ^ 1 for byte in shared.objects[key])


def other_steps(key: str, shared: ObjectMap) -> bytes:
    """A store that mixes two objects up: every entry is sound, and of other steps."""
    return shared.objects[key.replace(f"{SEGMENT_STEPS:020d}", f"{0:020d}").replace("1023", "0511")]


def nothing(key: str, shared: ObjectMap) -> bytes:
    del key, shared
    return b""


@pytest.mark.parametrize("spoil", [spoil_checksum, other_steps, nothing])
@scenario(virtually)
async def test_a_damaged_or_foreign_entry_is_read_from_the_segment(spoil) -> None:
    shared = await long_lake(4)
    lake_id = (await open_lake(FaultyStore(shared))).lake_id
    key = extent(entries_prefix(lake_id), SegmentIndex(1))
    body = spoil(key, shared)
    shared.remove(key)
    shared.put(key, body)
    _, reader = await follow(shared)
    entry = await reader.lone_entry(Step(700))
    assert entry.step == 700
    assert await same(reader, shared, 700)


@scenario(virtually)
async def test_an_entry_of_another_history_is_not_believed() -> None:
    """Sound, of this lake and this step, but not of the segment that the reader's state refers to."""
    shared = await long_lake(4)
    _, reader = await follow(shared)
    time_ms, digest = reader.state.segment_ref(SegmentIndex(1))
    assert await reader.lone_entries.load(Step(700), (time_ms, bytes(8))) is None
    fresh = (await follow(shared))[1]
    assert await fresh.lone_entries.load(Step(700), (time_ms, digest)) is not None


@scenario(virtually)
async def test_what_arrives_after_a_reopen_is_not_kept() -> None:
    """A zombie's history may have been read meanwhile: only what was asked for since is of this one."""
    shared = await long_lake(4)
    _, reader = await follow(shared)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.lone_entries.load, Step(700), reader.state.segment_ref(SegmentIndex(1)))
        await trio.lowlevel.checkpoint()
        reader.lone_entries.clear()
    assert reader.lone_entries.get(Step(700)) is None


@scenario(virtually)
async def test_memory_is_bounded() -> None:
    _, reader = await follow(await long_lake(64))
    lone = LoneEntries(reader.store, reader.identity, bytes_max=100_000)
    for step in range(0, 2048, 5):
        await lone.load(Step(step), reader.state.segment_ref(SegmentIndex(step // SEGMENT_STEPS)))
    kept = sum(lone.get(Step(step)) is not None for step in range(2048))
    assert kept == 100_000 // (1024 + 64 * 24)


@scenario(virtually)
async def test_a_store_that_refuses_the_entries_does_not_stop_the_snapshot() -> None:
    """The producer's policy may be older than this object."""

    class Refusing(FaultyStore):
        async def create(self, key: str, body: bytes) -> Put:
            if "/entries/" in key:
                raise RefusedError("AccessDenied")
            return await super().create(key, body)

    shared = ObjectMap()
    await create_lake(FaultyStore(shared), slices=1, clock=TrioClock())
    with scaled(SEGMENT_STEPS=4):
        store = Refusing(shared)
        async with AsyncProducer("memory://", producer_id="p", store=store, clock=TrioClock()) as producer:
            for _ in range(9):
                await producer.append([b"x"], position=None)
                await producer.flush()
        kinds = {key.split("/")[1] for key in shared.objects if "/" in key}
        assert {"index", "snapshot"} <= kinds
        assert "entries" not in kinds


@scenario(virtually)
async def test_producers_write_the_entries_beside_each_segment() -> None:
    shared = ObjectMap()
    identity = await create_lake(FaultyStore(shared), slices=2, clock=TrioClock())
    with scaled(SEGMENT_STEPS=4):
        async with AsyncProducer(
            "memory://", producer_id="p", store=FaultyStore(shared), clock=TrioClock()
        ) as producer:
            for step in range(10):
                await producer.append([b"x" * step] * 2, position=None)
                await producer.flush()
        store, reader = await follow(shared)
        entry = await reader.lone_entry(Step(6))
        assert entry.tgb.length(SliceIndex(1)) == 6
        assert [key.split("/")[1] for _, key in store.counts.keys or ()] == ["entries"]
        assert extent(index_prefix(identity.lake_id), SegmentIndex(0)) in shared.objects
