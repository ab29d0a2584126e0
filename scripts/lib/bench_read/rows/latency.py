"""From a commit to the moment its file can be read through a mount.

The clock starts when the server has answered the conditional create that is the commit, and stops when another
process has read the new step's file whole. The bound is the interval at which the mount looks plus two round trips.
"""

from __future__ import annotations

import random
import time
from subprocess import PIPE, Popen
from typing import Any

import trio

from bench.bed import Bed
from bench.machine import program
from bench.report import Row, at_most, median, quantile
from stepfs.store.api import Put, Store
from stepfs.store.opening import open_store
from stepfs_producer import AsyncProducer

POLL_S = 0.1
WARM = 10  # commits until the mount looks as often as it should; it slept long before the first
SLICES = 2


class Noting:
    """A store that notes when each conditional create was answered."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.created: list[float] = []

    async def create(self, key: str, body: bytes) -> Put:
        outcome = await self._store.create(key, body)
        if "/log/" in key and outcome is Put.CREATED:
            self.created.append(time.monotonic())
        return outcome

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def latency(bed: Bed) -> None:
    """Commits in quick succession, which keep the mount looking at its shortest interval; then leisurely ones."""
    count = bed.plan.commits
    _measure(bed, "commits 20 to 80 ms apart", (0.02, 0.08), count, judged=True)
    _measure(bed, "commits 0.5 to 1.5 s apart", (0.5, 1.5), max(count // 10, 5), judged=False)


def _measure(bed: Bed, name: str, gaps_s: tuple[float, float], count: int, *, judged: bool) -> None:
    url = bed.lake("latency", SLICES, iter([[b"first"] * SLICES]))
    with bed.mounted(url, "--poll", f"{POLL_S * 1000:.0f}ms") as mount:
        command = program("bench_read.programs.watch_steps", str(mount.directory), "1", str(WARM + count))
        with Popen(command, stdout=PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            assert watcher.stdout.readline()
            trips, created = trio.run(_commit, url, gaps_s, WARM + count)
            readable = [float(line) for line in watcher.stdout]
    waits = [seen - made for made, seen in zip(created[-count:], readable[WARM:], strict=True)]
    trip = median(trips)
    bed.report.figures[f"latency, {name}"] = {"waits": waits, "round trips": trips}
    text = f"p50 {quantile(waits, 0.5) * 1e3:.0f} ms; round trip {trip * 1e3:.1f} ms, p99 {quantile(trips, 0.99) * 1e3:.0f}"
    p99 = quantile(waits, 0.99)
    ours = f"p99 {p99 * 1e3:.0f} ms"
    if judged:
        bound = round(1000 * (POLL_S + 2 * trip), 1)
        bed.report.add(at_most(bound, f"commit → readable, {name}", ours, text, p99 * 1000, "ms"))
    else:
        bed.report.add(Row(f"commit → readable, {name}", ours, text))


async def _commit(url: str, gaps_s: tuple[float, float], count: int) -> tuple[list[float], list[float]]:
    """(round trips, moments of commit)."""
    draw = random.Random(3)
    store = open_store(url)
    noting = Noting(store)
    trips = []
    async with AsyncProducer(url, producer_id="late", store=noting) as producer:
        for number in range(count):
            await producer.append([bytes(1000)] * SLICES, position=number)
            await producer.flush()
            began = time.monotonic()
            await store.get("lake.msgpack")
            trips.append(time.monotonic() - began)
            await trio.sleep(draw.uniform(*gaps_s))
    await store.aclose()
    return trips, noting.created
