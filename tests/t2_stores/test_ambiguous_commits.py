"""The whole producer on a real server behind a proxy that loses replies: neither a duplicate nor a loss (hazards 2, 3)."""

from __future__ import annotations

import faultproxy
import pytest
import servers
from faultproxy import (
    CONFLICT_409,
    ERROR_500_APPLIED,
    FALSE_412,
    LOST_REQUEST,
    LOST_RESPONSE,
    RESET_AFTER,
    RESET_BEFORE,
    SLOW_DOWN_503,
)

from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
from stepfs.store.s3.s3_store import S3Store
from stepfs_producer import AsyncProducer

STEPS = 12


async def produce_through(proxy, url: str, first: int, end: int) -> None:
    prefix = url.removeprefix(f"s3://{servers.BUCKET}/")
    store = S3Store(
        servers.BUCKET, prefix, endpoint_url=proxy.endpoint_url, commit_timeout_s=1.0, data_timeout_s=2.0
    )
    async with AsyncProducer(url, producer_id="p", store=store) as producer:
        for step in range(first, end):
            await producer.append([f"record {step}".encode()], position=step)
            if step % 2:
                await producer.flush()


async def payloads_of(url: str) -> list[bytes]:
    store = open_store(url)
    reader = await LogReader.open(store, await open_lake(store))
    found = []
    for step in range(reader.state.next_step):
        tgb = (await reader.entry(Step(step))).tgb
        ref = tgb.slice(SliceIndex(0))
        buffer = bytearray(ref.length)
        assert await store.read_into(tgb.key, ref.offset, memoryview(buffer)) == ref.length
        found.append(bytes(buffer))
    await store.aclose()
    return found


async def lake_at(url: str) -> None:
    store = open_store(url)
    await create_lake(store, slices=1)
    await store.aclose()


@pytest.mark.parametrize(
    "trouble",
    [
        LOST_RESPONSE,
        RESET_AFTER,
        ERROR_500_APPLIED,
        LOST_REQUEST,
        RESET_BEFORE,
        SLOW_DOWN_503,
        CONFLICT_409,
        FALSE_412,
        faultproxy.delayed(0.5),
    ],
    ids=lambda trouble: trouble.name,
)
async def test_a_commit_whose_reply_is_lost_happens_exactly_once(s3_url, fault_proxy, trouble):
    await lake_at(s3_url)
    for _ in range(3):
        fault_proxy.once("PUT", "/log/", trouble)
    await produce_through(fault_proxy, s3_url, 0, STEPS // 2)
    assert sum(handled.trouble == trouble.name for handled in fault_proxy.handled) == 3
    await produce_through(fault_proxy, s3_url, STEPS // 2, STEPS)
    assert await payloads_of(s3_url) == [f"record {step}".encode() for step in range(STEPS)]
