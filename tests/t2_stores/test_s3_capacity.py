"""Uploads that do not get through hold up nobody who follows the log, reads the floor or commits."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import servers
import trio
from faultproxy import LOST_REQUEST, FaultProxy

from stepfs.store.api import Put
from stepfs.store.opening import open_store
from stepfs.store.s3.s3_store import S3Store
from stepfs.store.settings import COMMIT_THREADS_MAX, CONTROL_THREADS_MAX, DATA_THREADS_MAX

UPLOADS = DATA_THREADS_MAX + 8
DATA_TIMEOUT_S = 20.0


@pytest.fixture
async def stores(fault_proxy: FaultProxy, s3_url: str) -> AsyncIterator[tuple[S3Store, S3Store]]:
    """(through the proxy, around it)."""
    direct = open_store(s3_url)
    assert isinstance(direct, S3Store)
    prefix = direct.url.removeprefix(f"s3://{servers.BUCKET}/")
    proxied = S3Store(servers.BUCKET, prefix, endpoint_url=fault_proxy.endpoint_url, data_timeout_s=DATA_TIMEOUT_S)
    yield proxied, direct
    with trio.CancelScope(shield=True):
        await proxied.aclose()
        await direct.aclose()


async def test_the_commit_path_answers_while_all_uploads_hang(stores, fault_proxy):
    proxied, direct = stores
    await direct.create("log/0", b"zero")
    for _ in range(UPLOADS):
        fault_proxy.once("PUT", "/data/", LOST_REQUEST)
    async with trio.open_nursery() as nursery:
        for number in range(UPLOADS):
            nursery.start_soon(proxied.put, f"data/{number}", [b"x" * 1000])
        with trio.fail_after(DATA_TIMEOUT_S - 1):
            while len(fault_proxy.handled) < DATA_THREADS_MAX:  # noqa: ASYNC110 - the proxy tells nobody
                await trio.sleep(0.01)
            assert proxied._calls.data_threads.borrowed_tokens == DATA_THREADS_MAX
            assert await proxied.get("log/0") == b"zero"
            assert await proxied.get("log/1") is None
            assert await proxied.create("log/1", b"one") is Put.CREATED
            assert len(await proxied.list("log/")) == 2
            await follow_all_at_once(proxied)
            assert proxied._calls.data_threads.borrowed_tokens == DATA_THREADS_MAX, (
                "none of the uploads got through meanwhile"
            )
        nursery.cancel_scope.cancel()


async def follow_all_at_once(store: S3Store) -> None:
    """As many control requests as there are threads for them."""
    async with trio.open_nursery() as nursery:
        for _ in range(CONTROL_THREADS_MAX):
            nursery.start_soon(store.get, "log/0")


async def test_one_store_never_runs_more_than_sixty_four_threads(stores: tuple[S3Store, S3Store]) -> None:
    proxied, _ = stores
    calls = proxied._calls
    limiters = (calls.data_threads, calls._control_threads, calls._commit_threads)
    assert sum(limiter.total_tokens for limiter in limiters) == 64


async def test_every_thread_finds_a_pooled_connection(stores: tuple[S3Store, S3Store]) -> None:
    clients = stores[1]._clients
    assert clients.data().meta.config.max_pool_connections == CONTROL_THREADS_MAX + DATA_THREADS_MAX  # type: ignore[attr-defined]
    assert clients.commit().meta.config.max_pool_connections == COMMIT_THREADS_MAX  # type: ignore[attr-defined]
