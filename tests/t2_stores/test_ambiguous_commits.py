"""The whole producer on a real server behind a proxy that loses replies: neither a duplicate nor a loss (hazards 2, 3)."""

from __future__ import annotations

import faultproxy
import pytest
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
)

from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Store
from stepfs.store.opening import open_store
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


async def test_commits_whose_replies_are_lost_happen_exactly_once(network):
    await lake_at(network.url)
    for trouble in TROUBLES:
        network.proxy.once("PUT", "log", trouble)
    await produce(network.url, network.impatient(), 0, STEPS // 2)
    met = [handled.trouble for handled in network.proxy.handled if handled.trouble]
    assert sorted(met) == sorted(trouble.name for trouble in TROUBLES)
    await produce(network.url, network.impatient(), STEPS // 2, STEPS)
    assert await payloads_of(network.url) == [f"record {step}".encode() for step in range(STEPS)]


@pytest.mark.logs("trying on for 600 s")
@pytest.mark.parametrize("commits", [25, pytest.param(2000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
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
