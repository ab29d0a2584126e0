"""What the index costs a reader that jumps: one small read a step, and never other entries than the segment's."""

from __future__ import annotations

import random

import pytest
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from scenarios import scenario
from test_growth import generator, virtually

from stepfs.errors import CorruptError
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step
from stepfs.format.keys import extent, index_prefix
from stepfs.format.snapshot import place_of
from stepfs.lake.identity import open_lake
from stepfs.lake.log.index import SEGMENT_SHARE_BYTES, LoneEntries
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Counts

SEGMENTS = 6
STEPS = SEGMENTS * SEGMENT_STEPS + 5


async def long_lake(slices: int) -> ObjectMap:
    shared = ObjectMap()
    module = generator()
    module.open_store = lambda url, endpoint_url: FaultyStore(shared)  # type: ignore[attr-defined]
    await module.make("memory://", None, STEPS, slices, 64)
    return shared


class Watched(FaultyStore):
    """Remembers the segments that were read whole."""

    def __init__(self, shared: ObjectMap, actor: str) -> None:
        super().__init__(shared, actor=actor)
        self.whole: list[str] = []

    async def get(self, key: str, *, bytes_max: int = 256 << 20) -> bytes | None:
        if "/index/" in key:
            self.whole.append(key)
        return await super().get(key, bytes_max=bytes_max)


async def follow(shared: ObjectMap, *, actor: str = "reader") -> tuple[Watched, LogReader]:
    store = Watched(shared, actor)
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
        assert store.counts.bytes_read <= SEGMENT_SHARE_BYTES * (count + 8 * SEGMENTS)
        assert store.counts.requests - len(store.whole) <= count
    assert len(set(store.whole)) == len(store.whole) == SEGMENTS, "each once"
    assert store.counts.requests < len(order) / 10


@scenario(virtually)
async def test_where_segments_displace_each_other_steps_stay_alone() -> None:
    store, reader = await follow(await long_lake(4))
    reader.segments.limit(0)  # four are kept all the same
    order = list(range(0, SEGMENTS * SEGMENT_STEPS, 4)) * 2
    random.Random(3).shuffle(order)
    for step in order:
        await reader.lone_entry(Step(step))
    assert len(store.whole) == len(set(store.whole)) <= 4


@scenario(virtually)
async def test_a_segment_that_is_not_stored_yet_is_rebuilt_and_not_asked_for_again() -> None:
    shared = await long_lake(4)
    lake_id = (await open_lake(FaultyStore(shared))).lake_id
    expected = await (await follow(shared))[1].entry(Step(700))
    store, reader = await follow(shared)
    reader.segments.remember(await reader.load_segment(SegmentIndex(1)))
    shared.remove(extent(index_prefix(lake_id), SegmentIndex(1)))
    assert await reader.lone_entry(Step(700)) == expected
    assert await reader.lone_entries.load(Step(700), reader.state.segment_ref(SegmentIndex(1))) is None
    requests = store.counts.requests
    assert await reader.lone_entries.load(Step(701), reader.state.segment_ref(SegmentIndex(1))) is None
    assert store.counts.requests == requests


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
async def test_a_damaged_or_foreign_entry_is_not_believed(spoil) -> None:
    shared = await long_lake(4)
    lake_id = (await open_lake(FaultyStore(shared))).lake_id
    key = extent(index_prefix(lake_id), SegmentIndex(1))
    body = spoil(key, shared)
    shared.remove(key)
    shared.put(key, body)
    _, reader = await follow(shared)
    with pytest.raises(CorruptError, match="index/"):
        await reader.lone_entry(Step(700))
    assert (await reader.lone_entry(Step(40))).step == 40


@scenario(virtually)
async def test_a_damaged_entry_takes_no_other_with_it() -> None:
    shared = await long_lake(4)
    lake_id = (await open_lake(FaultyStore(shared))).lake_id
    key = extent(index_prefix(lake_id), SegmentIndex(1))
    body = bytearray(shared.objects[key])
    body[place_of(Step(700), 4) + 20] ^= 1
    shared.remove(key)
    shared.put(key, bytes(body))
    _, reader = await follow(shared)
    for other in (800, 900):
        with pytest.raises(CorruptError, match="index/"):
            await reader.lone_entry(Step(700))
        assert (await reader.lone_entry(Step(other))).step == other


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
