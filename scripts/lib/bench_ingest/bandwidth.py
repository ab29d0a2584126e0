"""Bytes per second into the store through a producer, against plain PUTs of objects of the same size.

The other side is what the store gives anyone: boto3's `put_object` from as many threads, one request per object,
nothing checksummed and nothing signed but the head. Beside it stands the project's own store client without a
producer, which splits uploads above 64 MiB and has every piece verified by the server. Sides take turns; all bytes
were written to once before, so no page is touched for the first time.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import trio

from bench.machine import MIB
from bench.report import Report, Row, at_least, median
from stepfs.lake.identity import create_lake
from stepfs.store.opening import open_store
from stepfs.store.s3.s3_store import S3Store
from stepfs_producer import AsyncProducer

SLICES = 8
AT_ONCE = 8
PATIENT_S = 60.0  # a producer tries again for minutes; its rival may not fail where it would not


async def run(report: Report, base_url: str, sizes_mib: tuple[int, ...], total_mib: int, rounds: int) -> None:
    """One row per size of TGB; `total_mib` per side and round."""
    store = open_store(base_url)
    await create_lake(store, slices=SLICES)
    try:
        for size_mib in sizes_mib:
            payload = secrets.token_bytes(size_mib * MIB)
            count = max(total_mib // size_mib, AT_ONCE)
            await _compare(report, base_url, payload, count, rounds)
    finally:
        await store.aclose()


async def _compare(report: Report, url: str, payload: bytes, count: int, rounds: int) -> None:
    sides: dict[str, Callable[[int], Awaitable[float]]] = {
        "producer": lambda _number: _produce(url, payload, count),
        "boto3": lambda number: trio.to_thread.run_sync(_put_plain, url, payload, count, number),
        "store": lambda number: _put_ours(url, payload, count, number),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    size_mib = len(payload) // MIB
    for number in range(rounds):
        for name in list(sides) if number % 2 else reversed(sides):
            rates[name].append(count * size_mib / await sides[name](number))
            report.say(f"{count} × {size_mib} MiB, {name}: {rates[name][-1]:.0f} MiB/s")
    report.figures.setdefault("bandwidth", {})[f"{size_mib} MiB"] = rates
    ours, plain, store = (median(rates[name]) for name in ("producer", "boto3", "store"))
    report.add(
        at_least(
            0.9,
            f"ingest, TGBs of {size_mib} MiB",
            f"{ours:.0f} MiB/s",
            f"parallel put_object: {plain:.0f} MiB/s",
            ours / plain,
        ),
        Row("… our store client without a producer", f"{store:.0f} MiB/s"),
    )


async def _produce(url: str, payload: bytes, count: int) -> float:
    """Seconds from the first append to the last commit. One id for all rounds: one that has just left still counts as
    a contender for a while, and pacing against a ghost is not what is measured here.
    """
    part = len(payload) // SLICES
    batch = [payload[index * part : (index + 1) * part] for index in range(SLICES)]
    async with AsyncProducer(url, producer_id="p", uploads=AT_ONCE) as producer:
        began = time.perf_counter()
        for step in range(count):
            await producer.append(batch, position=step)
        await producer.flush()
        return time.perf_counter() - began
    raise AssertionError


async def _put_ours(url: str, payload: bytes, count: int, number: int) -> float:
    place = urlsplit(url)
    store = S3Store(place.netloc, place.path.strip("/"), data_timeout_s=PATIENT_S)
    limiter = trio.CapacityLimiter(AT_ONCE)

    async def put(index: int) -> None:
        async with limiter:
            await store.put(f"raw/ours-{len(payload)}-{number}-{index}", [payload])

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for index in range(count):
            nursery.start_soon(put, index)
    took_s = time.perf_counter() - began
    await store.aclose()
    return took_s


def _put_plain(url: str, payload: bytes, count: int, number: int) -> float:
    import boto3  # noqa: PLC0415 - half a second that other parts should not pay
    from botocore.config import Config  # noqa: PLC0415

    place = urlsplit(url)
    config = Config(
        max_pool_connections=AT_ONCE,
        read_timeout=PATIENT_S,
        request_checksum_calculation="when_required",
        s3={"addressing_style": "path", "payload_signing_enabled": False},
    )
    client = boto3.session.Session().client(
        "s3", endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"], region_name="us-east-1", config=config
    )

    def put(index: int) -> None:
        key = f"{place.path.lstrip('/')}/raw/plain-{len(payload)}-{number}-{index}"
        client.put_object(Bucket=place.netloc, Key=key, Body=payload)

    began = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(put, range(count)))
    took_s = time.perf_counter() - began
    client.close()
    return took_s
