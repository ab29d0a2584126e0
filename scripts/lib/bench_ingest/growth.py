"""What one uncontended commit costs after 10² and after 10⁵ steps: requests, bytes, time; and opening a long lake cold.

Two producers, one on each lake, commit in turn, so that whatever disturbs the machine disturbs both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import trio

from bench.machine import make_long_lake
from bench.report import Report, Row, at_most, median
from stepfs.lake.identity import create_lake
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs_producer import AsyncProducer

SLICES = 4
SHORT_STEPS = 100
COLD_STEPS = 1_000_000
COLD_SLICES = 64
COLD_RSS_MB_MAX = 300
COLD_S_MAX = 2.0
_BATCH = [b"x" * 256] * SLICES
_OPEN_COLD = """
import json, resource, sys, time, trio
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
async def main(url):
    store = open_store(url)
    began, requests = time.perf_counter(), store.counts.requests
    reader = await LogReader.open(store, await open_lake(store))
    took = time.perf_counter() - began
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([took, rss, store.counts.requests, reader.state.next_step]))
trio.run(main, sys.argv[1])
"""


@dataclass
class Lane:
    """One lake and the producer that commits to it."""

    producer: AsyncProducer
    store: Store
    seconds: list[float] = field(default_factory=list)

    async def commit(self) -> None:
        began = time.perf_counter()
        await self.producer.append(_BATCH, position=None)
        await self.producer.flush()
        self.seconds.append(time.perf_counter() - began)


async def run(report: Report, name: str, base_url: str, long_steps: int, commits: int) -> None:
    """Rows for one store."""
    urls = [f"{base_url}/short", f"{base_url}/long"]
    await _make_short(urls[0])
    await trio.to_thread.run_sync(make_long_lake, urls[1], long_steps, SLICES)
    async with AsyncExitStack() as stack:
        lanes = []
        for url in urls:
            store = open_store(url)
            stack.push_async_callback(store.aclose)
            producer = AsyncProducer(url, producer_id="measured", store=store)
            lanes.append(Lane(await stack.enter_async_context(producer), store))
        for lane in lanes:
            await lane.commit()
            lane.seconds.clear()
        before = [(lane.store.counts.requests - lane.store.counts.put, _moved(lane)) for lane in lanes]
        for number in range(commits):
            for lane in lanes if number % 2 else reversed(lanes):
                await lane.commit()
        after = [(lane.store.counts.requests - lane.store.counts.put, _moved(lane)) for lane in lanes]
    requests = [(late[0] - early[0]) / commits for early, late in zip(before, after, strict=True)]
    moved = [(late[1] - early[1]) / commits for early, late in zip(before, after, strict=True)]
    times = [median(lane.seconds) for lane in lanes]
    report.figures.setdefault("growth", {})[name] = {
        "steps": [SHORT_STEPS, long_steps], "requests": requests, "bytes": moved, "seconds": times,
    }  # fmt: skip
    label = f"{long_steps:,} steps of history, {name}"
    report.add(
        Row(
            f"requests per commit, {label}",
            f"{requests[1]:.2f}",
            f"{SHORT_STEPS} steps: {requests[0]:.2f}",
            requests[1] / requests[0],
            "equal, ≤ 3",
            requests[1] == requests[0] <= 3,
        ),
        at_most(1.05, f"bytes per commit, {label}", f"{moved[1]:.0f}", f"{moved[0]:.0f}", moved[1] / moved[0]),
        at_most(
            1.3,
            f"append + commit time, {label}",
            f"{times[1] * 1e3:.1f} ms",
            f"{times[0] * 1e3:.1f} ms",
            times[1] / times[0],
        ),
    )


def _moved(lane: Lane) -> int:
    return lane.store.counts.bytes_written + lane.store.counts.bytes_read


async def _make_short(url: str) -> None:
    """A hundred real commits, of a producer that then retires: one that may come back is a contender for a while."""
    store = open_store(url)
    await create_lake(store, slices=SLICES)
    async with AsyncProducer(url, producer_id="generator", store=store) as producer:
        for _ in range(SHORT_STEPS):
            await producer.append(_BATCH, position=None)
            await producer.flush()
        await producer.retire()
    await store.aclose()


def cold_open(report: Report, directory: Path, steps: int, repeats: int) -> None:
    """Open a lake of `steps` steps in fresh processes, its files dropped from the page cache; time without imports."""
    url = (directory / "cold").as_uri()
    report.say(f"making {steps:,} steps of {COLD_SLICES} slices; this takes a while")
    make_long_lake(url, steps, COLD_SLICES)
    found = []
    for _ in range(repeats):
        drop_cached(Path(unquote(urlsplit(url).path)))
        done = subprocess.run([sys.executable, "-c", _OPEN_COLD, url], check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout))
    assert all(one[3] == steps for one in found)
    seconds, rss_mb = median([one[0] for one in found]), max(one[1] for one in found)
    report.figures["cold_open"] = found
    what = f"cold open, {steps:,} steps × {COLD_SLICES} slices, file://"
    report.add(
        at_most(COLD_S_MAX, what, f"{seconds:.2f} s", f"{found[0][2]} requests", seconds, "s"),
        at_most(COLD_RSS_MB_MAX, "… greatest RSS of that process", f"{rss_mb:.0f} MB", "", rss_mb, "MB"),
    )


def drop_cached(root: Path) -> None:
    """Tell the kernel to forget the contents of the log and the snapshots, and of nobody else's files."""
    for path in root.rglob("*"):
        if path.is_file() and path.parent.name in {"log", "snapshot", "floor"}:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
