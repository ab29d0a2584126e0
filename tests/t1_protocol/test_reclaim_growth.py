"""What a reclaim costs: by count, and in memory. An idle run costs the same at any length of a lake."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import partial

from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from stepfs.lake.floor import Floor
from stepfs.lake.group_records import list_groups
from stepfs_producer.lead.group_looks import GroupLooks, SlowestGroup
from test_growth import Lake, lake_of, virtually

from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.lake.groups import Group
from stepfs.lake.reclaim.run import Reclaimer, reclaim

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


def test_an_idle_run_costs_four_requests_at_any_length() -> None:
    """Log, floor, LIST of the groups, LIST of the nodes; `--every` reads lake.msgpack besides."""
    assert virtually(partial(idle, 100)) == virtually(partial(idle, 20_000)) == (4, 4)


async def single(steps: int) -> int:
    """Requests of a run by itself on a lake that an earlier run has left clean."""
    lake = await grouped(steps, [steps // 2 // SEGMENT_STEPS * SEGMENT_STEPS])
    await reclaim(paged(lake, "first"), lake.identity, clock=TrioClock())
    store = paged(lake, "second")
    assert (await reclaim(store, lake.identity, clock=TrioClock())).deleted_objects == 0
    return store.counts.requests


def test_a_run_by_itself_costs_no_more_on_a_longer_lake() -> None:
    short, long = (virtually(partial(single, segments * SEGMENT_STEPS + 1)) for segments in (4, 40))
    assert long <= short + 2
    assert long <= 25


async def buried(groups: int) -> tuple[int, int, int]:
    """Requests of a look and of two runs, with that many retired groups."""
    lake = await grouped(20, [5])
    for number in range(groups):
        gone = Group.of(paged(lake, "trainer"), lake.identity, f"gone{number}", TrioClock())
        await gone.register()
        await gone.retire()
    await reclaim(paged(lake, "first"), lake.identity, clock=TrioClock())
    store = paged(lake, "second")
    floor = Floor(store, lake.identity)
    await list_groups(store, lake.identity, floor)
    before = store.counts.requests
    assert list(await list_groups(store, lake.identity, floor)) == ["g0"]
    look = store.counts.requests - before
    before = store.counts.get
    await reclaim(store, lake.identity, clock=TrioClock())
    first = store.counts.get - before
    again = Group.of(paged(lake, "trainer"), lake.identity, "gone0", TrioClock())
    await again.register()
    assert set(await list_groups(store, lake.identity, floor)) == {"g0", "gone0"}, "it came back"
    return look, first, groups


def test_a_retired_group_is_not_read_again() -> None:
    few, many = virtually(partial(buried, 10)), virtually(partial(buried, 100))
    assert few[:2] == many[:2]
    assert many[0] == 3, "a LIST, the one live group, a probe of the floor"


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
    short, long = peak_bytes(4 * SEGMENT_STEPS), peak_bytes(12 * SEGMENT_STEPS)
    assert long < 16 << 20
    assert long < 1.5 * short


async def held_producer(groups: int) -> int:
    """Requests of one more look of a producer that `max_lead` holds back, with that many retired groups."""
    lake = await grouped(20, [5])
    for number in range(groups):
        gone = Group.of(paged(lake, "trainer"), lake.identity, f"gone{number}", TrioClock())
        await gone.register()
        await gone.retire()
    await reclaim(paged(lake, "reclaimer"), lake.identity, clock=TrioClock())
    store = paged(lake, "producer")
    looks = GroupLooks(store, lake.identity)
    assert await looks.next() == SlowestGroup("g0", Step(5))
    before = store.counts.requests
    assert await looks.next() == SlowestGroup("g0", Step(5))
    return store.counts.requests - before


def test_retired_groups_cost_a_held_producer_nothing() -> None:
    assert virtually(partial(held_producer, 40)) == 3
