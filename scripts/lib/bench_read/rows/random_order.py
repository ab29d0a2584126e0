"""Steps in random order: the same reader through a mount and by plain ranged GETs, on loopback and behind 20 ms.

The plain side knows every offset beforehand; the mount starts cold each round and learns them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import servers
import trio

from bench.bed import Bed
from bench.machine import program
from bench.report import at_least, at_most, median
from bench.slowed import slowed
from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store

SLICES, RANK, THREADS = 2, 0, 8
DELAY_S = 0.02

Ranges = list[tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class Samples:
    """A lake of small slices, where each lies, and how many are read."""

    url: str
    ranges: Ranges
    count: int


@cache
def samples(bed: Bed) -> Samples:
    quick = bed.plan.rounds < 3
    steps, count, size = (600, 100, 4 << 10) if quick else (3000, 800, 64 << 10)
    bed.report.say(f"making {steps} steps of {size >> 10} KiB slices")
    url = bed.lake("random", SLICES, _bodies(steps, size))
    return Samples(url, trio.run(_ranges, url), count)


def random_order(bed: Bed) -> None:
    """Two rows."""
    made = samples(bed)
    compare(bed, made, bed.server.endpoint_url, "on loopback", 0.75)
    with slowed(bed.server.endpoint_url, 1e9, DELAY_S) as store:
        compare(bed, made, store.url, "behind 20 ms", 1.0)


def compare(bed: Bed, made: Samples, endpoint: str, where: str, bound: float) -> None:
    """Samples a second by the mount and by ranged GETs, and what was fetched for them."""
    url, ranges, count = made.url, made.ranges, made.count
    rates: dict[str, list[float]] = {"mount": [], "boto3": []}
    shares, cpu_ms = [], []
    for number in range(min(bed.plan.rounds, 3)):
        chosen = random.Random(number).sample(range(len(ranges)), count)
        plain = {
            "ranges": [ranges[step] for step in chosen],
            "bucket": servers.BUCKET,
            "endpoint_url": endpoint,
        }
        rates["boto3"].append(_rate(plain, count))
        with bed.mounted(url, "--no-prime", environment={"AWS_ENDPOINT_URL_S3": endpoint}) as mount:
            before = mount.cpu_s()
            rates["mount"].append(_rate({"paths": [str(mount.path(step, RANK)) for step in chosen]}, count))
            cpu_ms.append(1000 * (mount.cpu_s() - before) / count)
            data = mount.data()
            shares.append(data["bytes_fetched"] / data["bytes_delivered"])
    bed.report.figures[f"random {where}"] = {**rates, "fetched / delivered": shares, "daemon ms": cpu_ms}
    ours, theirs = median(rates["mount"]), median(rates["boto3"])
    text = f"ranged GETs {theirs:,.0f}/s; daemon {median(cpu_ms):.1f} ms CPU a sample"
    bed.report.add(at_least(bound, f"random samples, {where}", f"{ours:,.0f}/s", text, ours / theirs))
    share = max(shares)
    bed.report.add(at_most(1.05, f"random, fetched / delivered, {where}", f"{share:.3f}", "", share, "×"))


def _rate(order: Mapping[str, object], count: int) -> float:
    """Samples per second of a fresh process."""
    command = program("bench_read.programs.random_reader")
    asked = json.dumps({**order, "threads": THREADS})
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    answer = json.loads(done.stdout)
    return float(count / answer["seconds"])


def _bodies(steps: int, size: int) -> Iterator[list[bytes]]:
    draw = random.Random(5)
    for _ in range(steps):
        yield [draw.randbytes(size) for _ in range(SLICES)]


async def _ranges(url: str) -> Ranges:
    """Where each step's slice lies, as the plain side knows it."""
    store = open_store(url)
    reader = await LogReader.open(store, await open_lake(store))
    prefix = url.partition(f"{servers.BUCKET}/")[2]
    found = []
    for step in range(reader.state.next_step):
        tgb = (await reader.entry(Step(step))).tgb
        part = tgb.slice(SliceIndex(RANK))
        found.append((f"{prefix}/{tgb.key}", part.offset, part.length))
    await store.aclose()
    return found
