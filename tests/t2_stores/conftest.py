"""The stores under contract: one fixture, every implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import cloudservers
import pytest
import rawserver
import servers
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from faultproxy import FaultProxy
from stubs3 import StubS3

from stepfs.store.api import Store
from stepfs.store.cloud.cloud_store import CloudStore, Timeouts
from stepfs.store.opening import open_store
from stepfs.store.s3.s3_store import S3Store
from stepfs.store.silence import Silence

LANES = 10


@pytest.fixture(params=["file", "memory", "s3", "gs", pytest.param("az", marks=pytest.mark.nightly)])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[list[Store]]:
    """Several processes' views of one empty store."""
    opened: list[Store]
    if request.param == "memory":
        shared = ObjectMap()
        opened = [
            FaultyStore(shared, actor=f"lane {lane}", latency=lambda _verb, _size, _rng: 0.0) for lane in range(LANES)
        ]
    else:
        url = request.getfixturevalue(f"{request.param}_url")
        opened = [open_store(url) for _ in range(LANES)]
    try:
        yield opened
    finally:
        with trio.CancelScope(shield=True):
            for one in opened:
                await one.aclose()


@pytest.fixture
def store(stores: list[Store]) -> Store:
    """An empty store."""
    return stores[0]


@pytest.fixture
async def stubbed(stub: StubS3) -> AsyncIterator[S3Store]:
    """A store whose server is `stub`."""
    opened = S3Store(servers.BUCKET, "lake", endpoint_url=stub.endpoint_url)
    yield opened
    await opened.aclose()


@pytest.fixture
async def direct(s3_url):
    store = open_store(s3_url)
    yield store
    await store.aclose()


def through(proxy, direct, **timeouts):
    prefix = direct.url.removeprefix(f"s3://{servers.BUCKET}/")
    return S3Store(servers.BUCKET, prefix, endpoint_url=proxy.endpoint_url, **timeouts)


@pytest.fixture
async def proxied(fault_proxy, direct):
    store = through(fault_proxy, direct)
    yield store
    with trio.CancelScope(shield=True):
        await store.aclose()


@pytest.fixture
async def hasty(fault_proxy, direct):
    """Gives up early on an answer that never comes; a busy server may also be too slow for it."""
    store = through(fault_proxy, direct, commit_timeout_s=2.0, data_timeout_s=2.0)
    yield store
    with trio.CancelScope(shield=True):
        await store.aclose()


class Cloud:
    """A server of gs:// or az:// behind a fault proxy: stores of one fresh prefix, through the proxy and past it."""

    def __init__(self, url: str, proxy: FaultProxy) -> None:
        self.url = url
        self.proxy = proxy
        self.direct = open_store(url)

    def through(self, **timeouts_s: float) -> CloudStore:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GOOGLE_BASE_URL", self.proxy.endpoint_url)
            patch.setenv("AZURE_STORAGE_ENDPOINT", f"{self.proxy.endpoint_url}/{cloudservers.ACCOUNT}")
            proxied = open_store(self.url)
        assert isinstance(proxied, CloudStore)
        return CloudStore(proxied._place, timeouts=Timeouts(**timeouts_s))

    def hasty(self) -> CloudStore:
        """Gives up early on an answer that never comes."""
        return self.through(commit=2.0, data=2.0, upload=2.0)

    def impatient(self) -> CloudStore:
        return self.through(commit=1.0, data=2.0, upload=2.0)

    def watched(self, silence: Silence) -> CloudStore:
        return CloudStore(self.through()._place, silence=silence)


class S3:
    """The same of s3://."""

    def __init__(self, url: str, proxy: FaultProxy) -> None:
        self.url = url
        self.proxy = proxy
        self.direct = open_store(url)
        self.made: list[Store] = [self.direct]

    def through(self, **options: object) -> S3Store:
        self.made.append(through(self.proxy, self.direct, **options))
        return self.made[-1]  # type: ignore[return-value]

    def hasty(self) -> S3Store:
        return self.through(commit_timeout_s=2.0, data_timeout_s=2.0)

    def impatient(self) -> S3Store:
        return self.through(commit_timeout_s=1.0, data_timeout_s=2.0)

    def watched(self, silence: Silence) -> S3Store:
        return self.through(silence=silence)


@pytest.fixture(params=["s3", "gs", pytest.param("az", marks=pytest.mark.nightly)])
async def network(request):
    """What a network and a server can do wrong to each kind of store."""
    async with behind_a_proxy(request, request.param) as found:
        yield found


@pytest.fixture(params=["gs", pytest.param("az", marks=pytest.mark.nightly)])
async def cloud(request):
    async with behind_a_proxy(request, request.param) as found:
        yield found


@asynccontextmanager
async def behind_a_proxy(request, kind):
    url = request.getfixturevalue(f"{kind}_url")
    server = request.getfixturevalue({"s3": "seaweed", "gs": "google", "az": "azurite"}[kind])
    proxy = FaultProxy(server.plain_port, certificate=getattr(server, "certificate", None))
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.serve)
        found = S3(url, proxy) if kind == "s3" else Cloud(url, proxy)
        yield found
        with trio.CancelScope(shield=True):
            for store in found.made if isinstance(found, S3) else ():
                await store.aclose()
        nursery.cancel_scope.cancel()


@pytest.fixture
def raw_s3(monkeypatch):
    """A server that answers whatever a test wants; nobody waits between tries."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0)
    monkeypatch.setattr("stepfs._internal.entropy.uniform", lambda low, _: low)
    with rawserver.raw_server() as running:
        yield running


@pytest.fixture
async def raw_store(raw_s3):
    """Makes stores on it."""
    made = []

    def make(endpoint_url=None, **timeouts):
        made.append(S3Store(servers.BUCKET, "lake", endpoint_url=endpoint_url or raw_s3.endpoint_url, **timeouts))
        return made[-1]

    yield make
    with trio.CancelScope(shield=True):
        for store in made:
            await store.aclose()
