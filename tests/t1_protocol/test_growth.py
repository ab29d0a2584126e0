"""Growth: what a commit and an opening cost does not depend on how much history there is. Exact, by count.

The long histories are those that `scripts/make_long_lake` makes, on a store in memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from long_lakes import MANY, SLICES, append, lake_of, virtually

from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.format.snapshot import StepEntry
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.verify.metadata import verify_metadata
from stepfs.store.api import Put


@dataclass(frozen=True)
class Cost:
    commits: int
    requests: tuple[str, ...]  # verb and room, of everything but uploads, in order
    bytes_written: int  # uploads too: they are the same
    bytes_read: int


async def cost(steps: int, tgbs: int, repeats: int = 1) -> Cost:
    """What `repeats` commits of `tgbs` TGBs each cost a producer that commits alone by now."""
    lake = await lake_of(steps)
    store = lake.store("measured")
    async with lake.producer(store) as producer:
        while not producer.tally.commits or producer.pacing.others:
            await append(producer)
            await producer.flush()
        before, counts = producer.tally.commits, store.counts
        written, read = counts.bytes_written, counts.bytes_read
        counts.keys = []
        for _ in range(repeats):
            for _ in range(tgbs):
                await append(producer)
            await producer.flush()
        rooms = [(verb, key.removeprefix(lake.identity.lake_id + "/").split("/")[0]) for verb, key in counts.keys]
        return Cost(
            commits=producer.tally.commits - before,
            requests=tuple(f"{verb} {room}" for verb, room in rooms if room != "data"),
            bytes_written=counts.bytes_written - written,
            bytes_read=counts.bytes_read - read,
        )


@pytest.mark.parametrize("tgbs", [1, 16])
def test_a_commit_after_many_steps_costs_what_it_costs_after_few(tgbs: int) -> None:
    short = virtually(partial(cost, 100, tgbs, 20))
    long = virtually(partial(cost, MANY, tgbs, 20))
    once = ("get log", "create log", "get control")
    assert short.commits == long.commits == 20
    assert short.requests == long.requests == once * 20
    assert long.bytes_written <= 1.05 * short.bytes_written
    assert long.bytes_read <= 1.05 * short.bytes_read, "the commit before, which it looks at"
    assert short.bytes_read < short.bytes_written


def test_snapshots_and_segments_included_growth_stays_below_5_percent() -> None:
    """Over a whole snapshot period, everything the producer sends: a snapshot's references grow, 1/512 per commit."""
    period = 2 * SEGMENT_STEPS
    short = virtually(partial(cost, 100, 1, period))
    long = virtually(partial(cost, MANY, 1, period))
    assert "create index" in short.requests
    assert len(long.requests) <= 1.01 * len(short.requests)
    moved = [found.bytes_written + found.bytes_read for found in (short, long)]
    assert moved[1] <= 1.05 * moved[0]


async def opened(steps: int) -> tuple[int, int]:
    """Requests of opening a lake cold, and of then reading one old entry."""
    lake = await lake_of(steps)
    store = lake.store("reader")
    reader = await LogReader.open(store, await open_lake(store))
    assert reader.state.next_step == steps
    requests = store.counts.requests
    await reader.entry(Step(7))
    return requests, store.counts.requests - requests


@pytest.mark.parametrize("tail", [pytest.param(1, marks=pytest.mark.nightly), 300])
def test_a_cold_reader_needs_as_many_requests_for_many_steps_as_for_few(tail: int) -> None:
    """The tail of a lake is at most a segment long and decides alone; an old entry takes one more request."""
    short, long = (
        virtually(partial(opened, segments * SEGMENT_STEPS + tail)) for segments in (2, MANY // SEGMENT_STEPS)
    )
    assert short == long
    assert long == (9 + tail, 1)


class Watched(FaultyStore):
    """Knows how many of its requests were under way together, and is asked before each create."""

    under_way = 0
    most = 0

    def __init__(self, shared: ObjectMap, actor: str, on_create: Callable[[str], None] = lambda _key: None) -> None:
        super().__init__(shared, actor=actor, latency=lambda _verb, _size, _rng: 0.01)
        self._on_create = on_create

    async def get(self, key: str, *, bytes_max: int = 256 << 20) -> bytes | None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return await super().get(key, bytes_max=bytes_max)
        finally:
            self.under_way -= 1

    async def create(self, key: str, body: bytes) -> Put:
        self._on_create(key)
        return await super().create(key, body)


def entries_in_memory() -> int:
    return sum(type(one) is StepEntry for one in gc.get_objects())


async def fork_of(segments: int) -> tuple[int, int, int]:
    """Entries in memory at most during a fork, the parent's segments that it read, and GETs under way at most."""
    lake = await lake_of(segments * SEGMENT_STEPS + 7)
    store = Watched(lake.shared, "operator")
    parent = await LogReader.open(store, lake.identity)
    parent.segments.limit(0)
    gc.collect()
    before, held = entries_in_memory(), []

    def look(key: str) -> None:
        if "/index/" in key:
            held.append(entries_in_memory() - before)

    store.counts.keys, store.most = [], 0
    cut = Step(SEGMENT_STEPS + 9)
    child = Watched(ObjectMap(), "child", look)
    identity = await fork(parent, child, Cut(cut, cut, Step(cut + 5)), TrioClock())
    reader = await LogReader.open(child, identity)
    assert reader.state.next_step == segments * SEGMENT_STEPS + 2
    assert len(held) == segments
    for step in (0, int(cut), reader.state.next_step - 1):
        ours, theirs = await reader.entry(Step(step)), await parent.entry(Step(step if step < cut else step + 5))
        assert (ours.tgb.key, ours.tgb.origin) == (theirs.tgb.key, 1)
    assert reader.state.total_bytes == reader.state.next_step * SLICES * 64
    read = sum(verb == "get" and "/index/" in key for verb, key in store.counts.keys)
    return max(held), read, store.most


def test_a_fork_writes_each_segment_as_it_fills_and_reads_several_at_once() -> None:
    held, read, most = virtually(partial(fork_of, 16))
    assert held <= 13 * SEGMENT_STEPS, "what is being written, and what the parent's reader keeps"
    assert read <= 16 + 5, "a segment is read once, but for the edges of each group"
    assert 1 < most <= 5


async def metadata_of(segments: int) -> tuple[int, int, float]:
    """Objects of a lake beside data, GETs under way together at most while they are verified, and round trips."""
    lake = await lake_of(segments * SEGMENT_STEPS + 7)
    store = Watched(lake.shared, "verifier")
    objects = sum("/data/" not in key for key in lake.shared.objects)
    start_s = trio.current_time()
    assert await verify_metadata(store, lake.identity) == []
    return objects, store.most, (trio.current_time() - start_s) / 0.01


def test_verify_reads_small_objects_several_at_once() -> None:
    objects, most, trips = virtually(partial(metadata_of, 20))
    assert objects > 30
    assert 1 < most <= 16
    assert trips < objects / 2
