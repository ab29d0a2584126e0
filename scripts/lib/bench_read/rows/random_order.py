"""Steps in random order: the same reader through a mount and by plain ranged GETs, on loopback and behind 20 ms.

The plain side knows every offset beforehand; the mount starts cold each round and learns them. Then the same with the order
announced, beside steps one after the other: the hit rates, which do not depend on the machine.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence

import servers
import trio

from bench.bed import Bed, Mount
from bench.machine import program
from bench.report import at_least, at_most, median
from bench_read.rows.faults import proxied
from stepfs import ShuffledSteps
from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store

SLICES, RANK, THREADS = 2, 0, 8
DELAY_S = 0.02
_BOUNDS = {"on loopback": 0.7, "behind 20 ms": 0.9}

Ranges = list[tuple[str, int, int]]


def random_order(bed: Bed) -> None:
    """All rows of the stage."""
    quick = bed.plan.rounds < 3
    steps, count, size = (600, 100, 4 << 10) if quick else (3000, 800, 64 << 10)
    bed.report.say(f"making {steps} steps of {size >> 10} KiB slices")
    url = bed.lake("random", SLICES, _bodies(steps, size))
    ranges = trio.run(_ranges, url)
    with proxied(bed) as proxy:
        for where, bound in _BOUNDS.items():
            endpoint = bed.server.endpoint_url
            if where != "on loopback":
                endpoint = proxy.endpoint_url
                proxy.tell("slow", delay_s=DELAY_S, bytes_per_s=1e9)
            _compare(bed, url, endpoint, ranges, where, bound, count)
    _hinted(bed, url, steps, count)


def _compare(bed: Bed, url: str, endpoint: str, ranges: Ranges, where: str, bound: float, count: int) -> None:
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


def _hinted(bed: Bed, url: str, steps: int, count: int) -> None:
    """Hit rates of one reader that pauses: in order, and in the order that it announced."""
    rates = {}
    for name in ("in order", "announced"):
        with bed.mounted(url, "--no-prime") as mount:
            order: Sequence[int] = range(count)
            if name == "announced":
                sampler = ShuffledSteps(mount.directory, stop=steps, seed=1)
                order = [step for step, _ in zip(sampler, range(count), strict=False)]
            rates[name] = _hit_rate(mount, order)
    bed.report.figures["random, hit rates"] = rates
    ratio = rates["announced"] / max(rates["in order"], 1e-9)
    row = at_least(
        0.95,
        "random order announced, hits",
        f"{rates['announced']:.1%}",
        f"in order {rates['in order']:.1%}",
        ratio,
    )
    bed.report.add(row)


def _hit_rate(mount: Mount, order: Sequence[int]) -> float:
    for step in order:
        mount.path(step, RANK).read_bytes()
        trio.run(trio.sleep, 0.005)  # a trainer computes
    data = mount.data()
    return data["hits"] / (data["hits"] + data["misses"])


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
