"""From append to commit: a producer alone, then one far from the store beside one that is near it.

Far is a wrapper around the store that sleeps before each request, so everything else of both is the same.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import trio

from bench.report import Report, Row, at_most, quantile
from stepfs.lake.identity import create_lake
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs_producer import AsyncProducer

NEAR_PERIOD_S = 0.03
FAR_PERIOD_S = 1.0
FAR_REQUEST_S = 0.1
LONE_P99_S = 0.3


@dataclass(frozen=True)
class Far:
    """A store behind a long way."""

    store: Store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        if name not in {"get", "read_into", "create", "put", "list", "delete"}:
            return found

        async def later(*args: Any, **kwargs: Any) -> Any:
            await trio.sleep(FAR_REQUEST_S)
            return await found(*args, **kwargs)

        return later


async def run(report: Report, base_url: str, seconds: float) -> None:
    """Rows of both; `seconds` each."""
    alone = await _side_by_side(f"{base_url}/alone", seconds, with_far=False)
    beside = await _side_by_side(f"{base_url}/beside", seconds, with_far=True)
    report.figures["latency"] = {"alone": alone, "beside": beside}
    report.add(
        at_most(
            LONE_P99_S, "append → commit, a lone producer", *_shown(alone["near"]), quantile(alone["near"], 0.99), "s"
        ),
        Row(f"… one at {1000 * FAR_REQUEST_S:.0f} ms a request beside it", *_shown(beside["far"])),
        Row("… the near one meanwhile", *_shown(beside["near"])),
    )


def _shown(waits_s: list[float]) -> tuple[str, str]:
    return f"p50 {quantile(waits_s, 0.5):.3f} s", f"p99 {quantile(waits_s, 0.99):.3f} s, {len(waits_s)} batches"


async def _side_by_side(url: str, seconds: float, *, with_far: bool) -> dict[str, list[float]]:
    """Seconds that each committed batch waited, by producer."""
    waits: dict[str, list[float]] = {"near": [], "far": []}
    async with aclosing(open_store(url)) as store, aclosing(open_store(url)) as other:
        await create_lake(store, slices=1)
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_produce, url, "near", store, NEAR_PERIOD_S, waits["near"])
                if with_far:
                    await trio.sleep(1.0)
                    nursery.start_soon(_produce, url, "far", Far(other), FAR_PERIOD_S, waits["far"])
    return waits


async def _produce(url: str, who: str, store: Any, period_s: float, waits_s: list[float]) -> None:
    appended_s: list[float] = []
    async with AsyncProducer(url, producer_id=who, store=store) as producer, trio.open_nursery() as nursery:
        nursery.start_soon(_watch, producer, appended_s, waits_s)
        while True:
            appended_s.append(trio.current_time())
            await producer.append([b"x" * 1024], position=len(appended_s))
            await trio.sleep(period_s)


async def _watch(producer: AsyncProducer, appended_s: list[float], waits_s: list[float]) -> None:
    while True:
        now_s = trio.current_time()
        waits_s += [now_s - at_s for at_s in appended_s[len(waits_s) : producer.committed_seq]]
        await trio.sleep(0.005)
