"""What the index costs a reader that jumps: one small read a step, and never other entries than the segment's."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from long_lakes import generator, virtually
from mutants import never_rebuilt
from process_store import ProcessStore
from producer_world import World, append, feed
from scenarios import scenario
from small_world import SEGMENT, checkpoint, inside_everywhere, process, register, small

from stepfs.errors import CorruptError, StoreUnreachableError
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step
from stepfs.format.keys import data_prefix, extent, index_prefix, snapshot_prefix
from stepfs.format.snapshot import place_of
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import open_lake
from stepfs.lake.log.index import SEGMENT_SHARE_BYTES, LoneEntries
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify.data import verify_lake
from stepfs.store.api import Counts, Put

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


UNSTORED = 6  # more than a reader keeps
UNSTORED_STEPS = UNSTORED * SEGMENT + 2


class NoSnapshots(FaultyStore):
    """A producer's way to a store that takes its commits, and then nothing more of it."""

    async def create(self, key: str, body: bytes) -> Put:
        if "/snapshot/" in key or "/index/" in key:
            raise StoreUnreachableError("no snapshot today")
        return await super().create(key, body)


async def unstored(world: World, steps: int = UNSTORED_STEPS, *, store: type[FaultyStore] = NoSnapshots) -> None:
    """One commit a step, and a group that needs them all."""
    if "run" not in world.ledger.promises:
        await register(world, "run")
    async with world.producer("a", store(world.shared, actor="a")) as producer:
        for number in range(producer.next_seq, steps):
            await append(producer, number)
            await producer.flush()


async def _nothing_to_read(world: World) -> None:
    prefixes = index_prefix(world.identity.lake_id), snapshot_prefix(world.identity.lake_id)
    assert not [key for key in world.shared.objects if key.startswith(prefixes)]


async def reads_all(world: World, reader: LogReader) -> None:
    """In an order that leaves nothing in memory when it is asked for."""
    reader.segments.limit(0)
    live = range(reader.first_live_step, reader.state.next_step)
    assert live.stop == len(world.ledger.steps)
    for step in [*live[::SEGMENT], *reversed(live)]:
        world.ledger.check_entry("reader", await reader.entry(Step(step)))
        world.ledger.check_entry("reader", await reader.lone_entry(Step(step)))
    assert not world.ledger.broken, world.ledger.broken


pytestmark = pytest.mark.logs("snapshot of version .* not written")


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("stored", [0, 2 * SEGMENT], ids=["none is stored", "some are"])
def test_a_reader_has_the_steps_of_segments_that_nobody_has_stored(continued: bool, stored: int) -> None:
    """Also one that goes on from the state of another process, and one that has no room for all of them."""

    async def read(world: World) -> None:
        if stored:
            await unstored(world, stored, store=FaultyStore)
        await unstored(world)
        reader = await LogReader.open(process(world, "reader"), world.identity)
        if continued:
            reader = await LogReader.continued(process(world, "worker"), world.identity, reader.state)
        await reads_all(world, reader)

    small(read)


@scenario(small, on=unstored)
async def test_verify_finds_such_a_lake_sound_and_a_fork_of_it_has_every_step(world: World) -> None:
    await _nothing_to_read(world)
    store = process(world, "operator")
    reader = await LogReader.open(store, world.identity)
    reader.segments.limit(0)
    result = await verify_lake(reader, origins=OriginStores(store, pytest.fail))
    assert (result.steps, result.errors) == (UNSTORED_STEPS, [])
    child = FaultyStore(ObjectMap(), actor="child")
    cut = Cut(Step(UNSTORED_STEPS), Step(UNSTORED_STEPS), Step(UNSTORED_STEPS))
    identity = await fork(reader, child, cut, TrioClock())
    forked = await LogReader.open(child, identity)
    keys = [(await forked.entry(Step(step))).tgb.key for step in range(UNSTORED_STEPS)]
    assert keys == [entry.tgb.key for entry in world.ledger.steps]


@pytest.mark.parametrize("below", range(1, UNSTORED_STEPS + 1, 3))
def test_a_reclaim_deletes_what_lies_below_also_in_a_segment_that_is_not_stored(below: int) -> None:
    async def reclaims(world: World) -> None:
        await checkpoint(world, "run", below)
        await reclaim(process(world, "reclaimer"), world.identity, clock=TrioClock())
        data = {key for key in world.shared.objects if key.startswith(data_prefix(world.identity.lake_id))}
        assert data == {entry.tgb.key for entry in world.ledger.steps[below:]}
        await reads_all(world, await LogReader.open(process(world, "reader"), world.identity))

    small(reclaims, on=unstored)


def test_a_segment_may_be_stored_and_its_log_reclaimed_inside_every_await_of_a_read() -> None:
    """What is read is rebuilt, or fetched, or below the floor by now; it is never called damage."""

    async def reads(world: World, store: ProcessStore) -> None:
        state = (await LogReader.open(process(world, "former"), world.identity)).state
        reader = await LogReader.continued(store, world.identity, state)
        await reader.entry(Step(UNSTORED_STEPS - SEGMENT))

    async def goes_on(world: World) -> None:
        async with world.producer("b") as producer:
            await feed(producer, SEGMENT)
        await checkpoint(world, "run", UNSTORED_STEPS - SEGMENT)
        await reclaim(process(world, "reclaimer"), world.identity, clock=TrioClock())

    async def nothing(_world: World) -> None: ...

    assert inside_everywhere(unstored, reads, goes_on, nothing) > 10


@scenario(small)
async def test_a_segment_that_a_snapshot_covers_and_that_is_gone_is_damage(world: World) -> None:
    """The log still has its steps, and a reclaim may delete them there: so `verify` reports it."""
    await unstored(world, store=FaultyStore)
    world.shared.remove(extent(index_prefix(world.identity.lake_id), SegmentIndex(1)))
    reader = await LogReader.open(process(world, "reader"), world.identity)
    with pytest.raises(CorruptError, match="index segment is missing"):
        await reader.entry(Step(SEGMENT))


def test_mutant_that_does_not_rebuild_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(world: World) -> None:
        known = (await LogReader.open(process(world, "reader"), world.identity)).state
        await reads_all(world, await LogReader.continued(process(world, "worker"), world.identity, known))

    never_rebuilt(monkeypatch)
    with pytest.raises(CorruptError):
        small(partial(read), on=unstored)
