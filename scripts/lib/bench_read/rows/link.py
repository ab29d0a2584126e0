"""Reads over a link: its delay and its bandwidth, in a process of their own, between the server and both sides.

What a link gives is one delay and then the bytes. The other side is boto3's loop over the same objects: ranged GETs of 8 MiB by
eight threads, in a fresh process whose connections are made. The server's own pages are warm, the rest is cold: each object is
read once a round and side.
"""

from __future__ import annotations

import random
from functools import partial

import servers

from bench.bed import Bed, data_objects, encoded
from bench.machine import MIB
from bench.report import Row, at_least, busy_share, cpu_ticks, median
from bench.slowed import slowed
from bench_read.rows.random_order import compare, samples

LINKS = ((0.02, 200e6), (0.005, 1e9))  # seconds, bytes a second
THREADS = 8
_TOUCHED = 2  # steps that the mount has read before: its buffers are in use


def link(bed: Bed) -> None:
    """Four rows a link; what a step is asked for first, a fresh mount answers."""
    rounds, size = bed.plan.rounds, bed.plan.file_bytes
    bed.report.say(f"making {2 * rounds + _TOUCHED} steps of {size // MIB} MiB")
    url = bed.lake("link", 1, ([encoded("raw", size, number)] for number in range(2 * rounds + _TOUCHED)))
    objects = data_objects(url)
    order = {"bucket": servers.BUCKET, "bytes": size, "threads": THREADS}
    bed.probe(kind="boto3", keys=objects, **order)  # the server's own pages
    chance = random.Random(17)
    memory = f"{2 * size // MIB + 64}M"
    for delay_s, bandwidth in LINKS:
        where = f"{1e3 * delay_s:g} ms, {bandwidth / 1e6:,.0f} MB/s"
        ideal_s = delay_s + size / bandwidth
        seconds: dict[str, list[float]] = {}
        ticks = cpu_ticks()
        with slowed(bed.server.endpoint_url, bandwidth, delay_s) as store:
            far = {"environment": {"AWS_ENDPOINT_URL_S3": store.url}}
            for number in range(rounds):
                with bed.mounted(url, "--memory", memory, **far) as mount:
                    seconds.setdefault("first step", []).append(bed.read_once(mount.path(number, 0)))
            with bed.mounted(url, "--prefetch", "0", "--memory", memory, **far) as mount:
                for number in range(_TOUCHED):
                    bed.read_once(mount.path(2 * rounds + number, 0))
                for number in range(rounds, 2 * rounds):
                    ours = partial(bed.read_once, mount.path(number, 0))
                    theirs = partial(_boto3, bed, {**order, "keys": [objects[number]], "endpoint_url": store.url})
                    for side, read in chance.sample([("stepfs", ours), ("boto3", theirs)], 2):
                        seconds.setdefault(side, []).append(read())
            busy = busy_share(ticks, cpu_ticks())
            speed = bed.speeds(f"link {where}", seconds, size)
            text = f"boto3 × {THREADS} {speed['boto3']:,.0f} MB/s"
            cold, gives = speed["stepfs"], size / 1e6 / ideal_s
            limit = f"the link gives {gives:,.0f} MB/s; cores {busy:.0%} busy"
            bed.report.add(
                at_least(0.97, f"cold, {where}", f"{cold:,.0f} MB/s", limit, cold / gives),
                at_least(1.0, "  beside boto3", f"{cold:,.0f} MB/s", text, cold / speed["boto3"]),
                Row(
                    f"  first step of a fresh mount, {size // MIB} MiB",
                    f"{median(seconds['first step']):.3f} s",
                    f"boto3 {median(seconds['boto3']):.3f} s, the link {ideal_s:.3f} s",
                    median(seconds["boto3"]) / median(seconds["first step"]),
                ),
            )
            compare(bed, samples(bed), store.url, where, 1.0)


def _boto3(bed: Bed, order: dict[str, object]) -> float:
    return float(bed.probe(kind="boto3", **order)["seconds"][0])
