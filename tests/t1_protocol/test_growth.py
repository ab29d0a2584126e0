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
from long_lakes import MANY, SLICES, Lake, append, lake_of, virtually

from stepfs.errors import OtherHistoryError
from stepfs.format.ids import SEGMENT_STEPS, Step, Version
from stepfs.format.keys import data_prefix
from stepfs.format.snapshot import LogState, StepEntry
from stepfs.lake.control import Group
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import open_lake
from stepfs.lake.log.carriers import LEVELS
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim import dead
from stepfs.lake.reclaim.run import Reclaimer
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
        # All carry as much: a carrier of the highest level is the last before these.
        while not producer.tally.commits or producer.pacing.others or lake.versions() % LEVELS[-1]:
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
    repeats = LEVELS[0]
    short = virtually(partial(cost, 100, tgbs, repeats))
    long = virtually(partial(cost, MANY, tgbs, repeats))
    once = ("get log", "create log", "get control")
    assert short.commits == long.commits == repeats
    assert short.requests == long.requests == once * repeats
    assert long.bytes_written <= 1.05 * short.bytes_written
    assert long.bytes_read <= 1.05 * short.bytes_read, "the commit before, which it looks at"


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


@pytest.mark.parametrize("tail", [pytest.param(1, marks=pytest.mark.nightly), 504])
def test_a_cold_reader_needs_as_many_requests_for_many_steps_as_for_few(tail: int) -> None:
    """The tail of a lake is at most a segment long, and carriers have most of it; an old entry takes one more request."""
    short, long = (
        virtually(partial(opened, segments * SEGMENT_STEPS + tail)) for segments in (2, MANY // SEGMENT_STEPS)
    )
    assert short == long
    assert long[0] <= 30
    assert long[1] == 1


@pytest.mark.parametrize("continued", [False, True])
def test_an_opening_waits_for_six_answers_one_after_another(continued: bool) -> None:
    """As a forked worker opens it, for four."""

    async def scenario() -> int:
        lake = await lake_of(MANY)
        await Group.of(lake.store("trainer"), lake.identity, "run").add(Step(MANY - 9))
        known = (await LogReader.open(lake.store("before"), lake.identity)).knows
        store, began_s = lake.store("reader"), trio.current_time()
        if continued:
            await LogReader.continued(store, lake.identity, known)
        else:
            await LogReader.open(store, lake.identity)
        return round((trio.current_time() - began_s) / 0.01)

    assert virtually(scenario) == (4 if continued else 6)


async def commit(lake: Lake, commits: int, tgbs: int = 1) -> None:
    async with lake.producer(lake.store("measured")) as producer:
        for _ in range(commits):
            for _ in range(tgbs):
                await append(producer)
            await producer.flush()


@pytest.mark.parametrize("commits", [600, 1300])
def test_one_that_is_far_behind_goes_on_from_a_snapshot(commits: int) -> None:
    async def scenario() -> None:
        lake = await lake_of(7)
        store = lake.store("reader")
        reader = await LogReader.open(store, lake.identity)
        await commit(lake, commits)
        before = store.counts.requests
        while await reader.poll():
            pass
        assert store.counts.requests - before <= 16 + reader.state.version % SEGMENT_STEPS
        opened = await LogReader.open(lake.store("new"), lake.identity)
        assert reader.state == opened.state
        assert await reader.entry(Step(9)) == await opened.entry(Step(9))

    virtually(scenario)


def test_no_snapshot_of_another_history_is_taken_for_a_continuation() -> None:
    """The store is put back to an older copy between a probe and the LIST behind it."""

    async def scenario() -> None:
        lake = await lake_of(3)
        old = dict(lake.shared.objects)
        await commit(lake, 4)
        reader = await LogReader.open(lake.store("reader"), lake.identity)
        shown = reader.head
        lake.shared.objects = old
        lake.shared._keys = sorted(old)
        await commit(lake, 600)
        assert not await reader._jump()
        assert reader.head is shown
        with pytest.raises(OtherHistoryError):
            await reader.poll()

    virtually(scenario)


async def reclaimed(commits: int, left: int) -> tuple[int, int, list[str]]:
    """GETs and bytes that a reclaim of all but the last `left` steps reads, and the live objects after it."""
    lake = await lake_of(7)
    await commit(lake, commits)
    await Group.of(lake.store("trainer"), lake.identity, "run").add(Step(7 + commits - left))
    store = lake.store("reclaimer")
    store.counts.keys = []
    await Reclaimer(store, lake.identity, clock=TrioClock()).run()
    gets = sum(verb == "get" for verb, _ in store.counts.keys)
    live = [key for key in lake.shared.objects if key.startswith(data_prefix(lake.identity.lake_id))]
    opened = await LogReader.open(lake.store("audit"), lake.identity)
    assert opened.control.record.deleted_bytes == 64 * SLICES * (7 + commits - left)
    return gets, store.counts.bytes_read, live


def test_a_reclaim_reads_as_much_however_many_steps_go() -> None:
    """The commit of the first live step counts the bytes below it; a snapshot knows each producer's last dead step."""
    few, bytes_few, live = virtually(partial(reclaimed, 1100, 40))
    many, bytes_many, _ = virtually(partial(reclaimed, 2124, 40))
    assert len(live) == 40
    assert many == few
    assert bytes_many <= 1.1 * bytes_few


@pytest.mark.parametrize("first_live", range(16, 24))
def test_bytes_are_counted_also_where_the_first_live_step_is_in_the_middle_of_a_commit(first_live: int) -> None:
    async def scenario() -> None:
        lake = await lake_of(7)
        await commit(lake, 10, 3)
        store = lake.store("reader")
        reader = await LogReader.open(store, lake.identity)
        assert await dead.payload_bytes_below(reader, Step(first_live)) == 64 * SLICES * first_live

    virtually(scenario)


def test_mutant_a_snapshot_at_the_cut_deletes_live_data(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = dead._newest_snapshot

    async def above(reader: LogReader, at_most: Version) -> LogState | None:
        del at_most
        return await newest(reader, reader.state.version)

    monkeypatch.setattr(dead, "_newest_snapshot", above)
    _, _, live = virtually(partial(reclaimed, 1100, 400))
    assert len(live) < 400


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
