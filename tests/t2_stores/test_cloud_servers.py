"""Servers behind gs:// and az:// that are absent, cannot be trusted, or ignore conditions; and the cost of a commit."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

import cloudservers
import pytest
import servers
import trio
from certificates import self_signed
from stubs3 import Answer, stub_s3, xml_error

from stepfs.errors import AbsentError, RefusedError, StoreUnreachableError
from stepfs.lake.identity import create_lake
from stepfs.store.api import Put
from stepfs.store.opening import open_store
from stepfs.store.probe import probe_store
from stepfs_producer import AsyncProducer


async def test_a_container_that_is_not_there_is_named(cloud):
    store = open_store(cloud.url.replace(servers.BUCKET, "no-such-place"))
    for call in (
        lambda: store.get("a"),
        lambda: store.read_into("a", 0, memoryview(bytearray(1))),
        lambda: store.create("a", b""),
        lambda: store.put("a", [b""]),
        lambda: store.list(""),
    ):
        with pytest.raises(AbsentError, match=r"of .*no-such-place.* does not exist .*create it first"):
            await call()


async def test_what_a_probe_found_is_told_also_where_it_cannot_clean_up(monkeypatch):
    """Azurite answers 500 to a batch of deletes with a SAS."""
    monkeypatch.setattr("stepfs.entropy.uniform", lambda low, _: low)
    with stub_s3() as stub:
        refusals = {"PUT": xml_error(403, "AuthorizationPermissionMismatch"), "POST": Answer(500)}
        stub.answer = lambda method, _: refusals.get(method, xml_error(404, "BlobNotFound"))
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{stub.endpoint_url}/account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", cloudservers.KEY)
        with pytest.raises(RefusedError, match="403 AuthorizationPermissionMismatch"):
            await probe_store(open_store("az://account/container/x"), thorough=True)


async def test_a_server_that_is_not_there_is_unreachable(monkeypatch):
    monkeypatch.setattr("stepfs.entropy.uniform", lambda low, _: low)
    monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{servers.free_port_of_nobody()}")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "x")
    store = open_store("gs://bucket/x")
    with pytest.raises(StoreUnreachableError, match="Connection refused; check the network and GOOGLE_BASE"):
        await store.get("a")
    assert await store.create("a", b"") is Put.UNKNOWN
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "https://nobody.invalid")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", cloudservers.KEY)
    with pytest.raises(StoreUnreachableError, match="check the account's name, the network"):
        await open_store("az://nobody/container").get("a")


async def test_a_server_nobody_vouches_for_is_refused(monkeypatch, nursery, tmp_path):
    context = self_signed(tmp_path).of_server()

    async def serve(stream):
        with suppress(trio.BrokenResourceError):  # the handshake that failed
            await stream.receive_some()

    listeners = await nursery.start(partial(trio.serve_ssl_over_tcp, serve, 0, context, host="127.0.0.1"))
    port = listeners[0].transport_listener.socket.getsockname()[1]
    monkeypatch.setenv("GOOGLE_BASE_URL", f"https://127.0.0.1:{port}")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "x")
    store = open_store("gs://bucket/x")
    for call in (lambda: store.get("a"), lambda: store.create("a", b"x")):
        with pytest.raises(RefusedError, match=r"certificate does not verify .*set SSL_CERT_FILE"):
            await call()


@pytest.mark.parametrize("thorough", [False, True])
async def test_a_server_that_ignores_conditions_is_refused(tmp_path, monkeypatch, thorough):
    """Hazard 4, as of gcp-storage-emulator."""
    with cloudservers.google(tmp_path, lies=True) as liar:
        for name, value in liar.environment().items():
            monkeypatch.setenv(name, value)
        store = open_store(f"{liar.home}/x")
        with pytest.raises(RefusedError, match="cannot hold a lake: conditional create: the condition is ignored"):
            await probe_store(store, thorough=thorough)
        assert await store.list("probe/") == []


async def test_an_uncontended_commit_takes_three_requests(cloud):
    store = open_store(cloud.url)
    await create_lake(store, slices=1)
    async with AsyncProducer(cloud.url, producer_id="p", store=store) as producer:
        await producer.append([b"x"], position=1)
        await producer.flush()
        store.counts.keys = []
        await producer.append([b"x"], position=2)
        await producer.flush()
        rooms = [f"{verb} {key.split('/')[1]}" for verb, key in store.counts.keys]
    assert rooms == ["put data", "get log", "create log", "get control"]


async def test_a_forked_process_is_refused_not_hung(cloud):
    await cloud.direct.get("a")
    code = os.fork()
    if code == 0:  # no trio in the child: only the client's own check
        try:
            cloud.direct._place.client(1.0)
        except RefusedError:
            os._exit(42)
        os._exit(1)
    status = await trio.to_thread.run_sync(os.waitpid, code, 0)
    assert os.waitstatus_to_exitcode(status[1]) == 42


async def test_a_key_that_is_listed_and_gone_reads_as_none(cloud):
    await cloud.direct.put("a/1", [b"x"])
    (entry,) = await cloud.direct.list("a/")
    await cloud.direct.delete(["a/1"])
    assert await cloud.direct.get(entry.key) is None
    assert await cloud.direct.read_into(entry.key, 0, memoryview(bytearray(1))) is None
