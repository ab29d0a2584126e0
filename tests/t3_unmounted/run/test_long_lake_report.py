"""A report of a long lake: what it reads does not grow with the steps, and it names its sample."""

from __future__ import annotations

from collections import Counter

import pytest
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock

from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.kept_plans import LineageReader
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs_producer import AsyncProducer
from stepfs_producer.plan.step import SourceState, State
from stepfs_producer.report.from_lake import COMMITS_MAX, LOOKED_MAX, report_of_lake

SLICES = 2
LONG = 6_000


async def lake_of(steps: int) -> ObjectMap:
    """Steps of two producers in turns, whose positions say that `web` gives twice as many tokens as `code`, then half."""
    shared = ObjectMap()
    store = FaultyStore(shared, latency=lambda *_: 0.0)
    await create_lake(store, slices=SLICES, ext=".safetensors", clock=TrioClock())
    async with (
        AsyncProducer("memory://", producer_id="plan", store=store, clock=TrioClock()) as plan,
        AsyncProducer("memory://", producer_id="other", store=store, clock=TrioClock()) as other,
    ):
        web = code = 0
        for step in range(steps // 2):
            late = step >= steps // 4
            web, code = web + (100 if late else 200), code + (200 if late else 100)
            sources = {"code": SourceState("0" * 16, "", tokens=code), "web": SourceState("0" * 16, "", tokens=web)}
            await plan.append([b"x"] * SLICES, position=State("0" * 32, step + 1, sources).position())
            await other.append([b"y"] * SLICES, position=step)
            if step % 16 == 15:
                await plan.flush()
                await other.flush()
    return shared


async def test_what_is_read_does_not_grow_with_the_steps(autojump_clock) -> None:
    costs, reports = [], []
    for steps in (LONG // 2, LONG):
        store = FaultyStore(await lake_of(steps), latency=lambda *_: 0.0)
        log = await LogReader.open(store, await open_lake(store), reads_only=True)
        store.counts.keys = []
        origins = OriginStores(store, lambda _, store=store: store)
        reports.append(await report_of_lake(LineageReader(log, origins), {}, ".", free_bytes=None, text=False))
        rooms = Counter(key.removeprefix(log.identity.lake_id + "/").split("/")[0] for _, key in store.counts.keys)
        costs.append(rooms)
    for rooms in costs:
        assert rooms["log"] <= COMMITS_MAX + LOOKED_MAX
        assert rooms["index"] <= COMMITS_MAX + LOOKED_MAX
        assert rooms["data"] <= SLICES * LOOKED_MAX
        assert sum(rooms.values()) <= 2 * COMMITS_MAX + 4 * LOOKED_MAX
    long = reports[-1]
    [contents] = long.contents
    assert contents.name == "plan"
    middle = contents.step // 2
    for point in contents.shares:
        share = point.tokens["web"] / sum(point.tokens.values())
        assert share == pytest.approx(2 / 3 if point.next <= middle else 1 / 3 if point.first >= middle else share)
    assert sum(sum(point.tokens.values()) for point in contents.shares) == contents.tokens == 300 * contents.step
    assert len(long.run.commits) <= COMMITS_MAX
    assert [one.next_step for one in long.run.commits] == sorted(one.next_step for one in long.run.commits)
    assert f"of {log.state.version + 1} versions" in long.sample
    assert any("left out" in note for note in long.notes), "files of another program are named"
    assert len(long.notes) <= 4 + LOOKED_MAX
