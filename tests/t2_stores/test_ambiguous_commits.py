"""The whole producer on a real server behind a proxy that loses replies: neither a duplicate nor a loss (hazards 2, 3)."""

from __future__ import annotations

from collections.abc import Callable

import faultproxy
import pytest
import servers
from faultproxy import (
    CONFLICT_409,
    ERROR_500_APPLIED,
    FALSE_412,
    KNOWN,
    LOST_REQUEST,
    LOST_RESPONSE,
    RESET_AFTER,
    RESET_BEFORE,
    SLOW_DOWN_503,
    FaultProxy,
    Trouble,
)

from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Put, Store
from stepfs.store.opening import open_store
from stepfs.store.s3.s3_store import S3Store
from stepfs_producer import AsyncProducer

STEPS = 12


async def produce(url: str, store: Store, first: int, end: int) -> None:
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


TROUBLES = [
    LOST_RESPONSE, RESET_AFTER, ERROR_500_APPLIED, LOST_REQUEST, RESET_BEFORE, SLOW_DOWN_503, CONFLICT_409, FALSE_412,
    faultproxy.delayed(0.5),
]  # fmt: skip


async def commit_in_trouble(url: str, proxy: FaultProxy, through: Callable[[], Store], troubles: list[Trouble]) -> None:
    await lake_at(url)
    for trouble in troubles:
        proxy.once("PUT", "log", trouble)
    await produce(url, through(), 0, STEPS // 2)
    met = [handled.trouble for handled in proxy.handled if handled.trouble]
    assert sorted(met) == sorted(trouble.name for trouble in troubles)
    await produce(url, through(), STEPS // 2, STEPS)
    assert await payloads_of(url) == [f"record {step}".encode() for step in range(STEPS)]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.name)
async def test_a_commit_whose_reply_is_lost_happens_exactly_once(s3_url, fault_proxy, trouble):
    def through() -> Store:
        prefix = s3_url.removeprefix(f"s3://{servers.BUCKET}/")
        endpoint_url = fault_proxy.endpoint_url
        return S3Store(servers.BUCKET, prefix, endpoint_url=endpoint_url, commit_timeout_s=1.0, data_timeout_s=2.0)

    await commit_in_trouble(s3_url, fault_proxy, through, [trouble] * 3)


async def test_a_create_is_sent_once_whatever_the_answer(s3_url, fault_proxy):
    """A client that sends it again reports its own success as taken."""
    prefix = s3_url.removeprefix(f"s3://{servers.BUCKET}/")
    store = S3Store(servers.BUCKET, prefix, endpoint_url=fault_proxy.endpoint_url)
    fault_proxy.once("PUT", "log", ERROR_500_APPLIED)
    assert await store.create("log/0", b"commit") is Put.UNKNOWN
    assert [handled.method for handled in fault_proxy.handled] == ["PUT"]
    await store.aclose()


async def test_so_it_does_in_other_clouds(cloud):
    await commit_in_trouble(cloud.url, cloud.proxy, lambda: cloud.through(commit=1.0, data=2.0, upload=2.0), TROUBLES)


@pytest.mark.logs("trying on for 600 s")
@pytest.mark.parametrize("commits", [25, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
async def test_of_many_commits_in_all_troubles_none_is_lost_and_none_doubled(cloud, commits):
    await lake_at(cloud.url)
    cloud.proxy.randomly(dict.fromkeys(KNOWN, 0.01))
    store = cloud.through(commit=0.5, data=0.5, upload=1.0)
    async with AsyncProducer(cloud.url, producer_id="p", store=store) as producer:
        for step in range(commits):
            await producer.append([f"record {step}".encode()], position=step)
            await producer.flush()
    assert await payloads_of(cloud.url) == [f"record {step}".encode() for step in range(commits)]
    assert {handled.trouble for handled in cloud.proxy.handled} > {""}
