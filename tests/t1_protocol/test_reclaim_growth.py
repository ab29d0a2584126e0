"""What a reclaim costs: by count, and in memory. An idle run costs the same at any length of a lake."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import partial

import trio
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from lakework import reclaim
from test_growth import Lake, lake_of, virtually

from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.lake.control import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.reclaim.run import Reclaimer, Report

GRACE_S = 3600.0
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


def test_an_idle_run_costs_two_requests_at_any_length() -> None:
    """The next version of the log and the next control record; `--every` reads lake.msgpack besides."""
    assert virtually(partial(idle, 100)) == virtually(partial(idle, 20_000)) == (2, 2)


async def timer(steps: int) -> list[int]:
    """Requests of runs that are a new process each, as by a timer, on a lake that an earlier run has left clean."""
    lake = await grouped(steps, [steps // 2 // SEGMENT_STEPS * SEGMENT_STEPS])
    await reclaim(paged(lake, "first"), lake.identity, clock=TrioClock(), grace_s=GRACE_S)
    await trio.sleep(2 * GRACE_S)
    await reclaim(paged(lake, "second"), lake.identity, clock=TrioClock(), grace_s=GRACE_S)
    costs = []
    for number in range(3):
        store = paged(lake, f"timer {number}")
        assert (await run_once(store)).deleted_objects == 0
        costs.append(store.counts.requests)
    return costs


async def run_once(store: FaultyStore) -> Report:
    """As `stepfs reclaim` does: the identity too."""
    return await reclaim(store, await open_lake(store), clock=TrioClock(), grace_s=GRACE_S)


def test_an_idle_run_of_a_new_process_costs_a_request_per_thousand_live_steps_and_one_per_segment() -> None:
    """Beside the 15 that the beginning costs at any length, it looks for orphans among all that is live."""
    for segments in (4, 40):
        live = segments * SEGMENT_STEPS // 2 + 1
        costs = virtually(partial(timer, segments * SEGMENT_STEPS + 1))
        assert max(costs) <= 15 + -(-live // 1000) + -(-live // SEGMENT_STEPS), costs
        assert len(set(costs)) == 1


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
