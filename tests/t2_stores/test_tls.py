"""Certificates are verified: a server nobody vouches for is refused, with what to do, before anything is sent."""

from __future__ import annotations

import pytest
import rawserver
import servers
import trio
from at_work import until
from certificates import self_signed
from directreads import FIRST, KEY, SIZE, learn, read, was_direct
from faultproxy import FaultProxy
from rawserver import BODY, Reply, part, wanted

from stepfs.errors import RefusedError
from stepfs.lake.identity import create_lake, open_lake
from stepfs.store.opening import open_store
from stepfs.store.s3.s3_store import S3Store


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """For 127.0.0.1, signed by itself."""
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def https(nursery, seaweed, certificate):
    """An https:// endpoint in front of SeaweedFS."""
    proxy = FaultProxy(seaweed.plain_port, certificate=certificate)
    await nursery.start(proxy.serve)
    yield proxy.endpoint_url
    nursery.cancel_scope.cancel()


async def test_a_server_nobody_vouches_for_is_refused(https, s3_url):
    store = open_store(s3_url, endpoint_url=https)
    with pytest.raises(RefusedError, match=r"certificate verify failed.*set AWS_CA_BUNDLE"):
        await store.get("a")
    with pytest.raises(RefusedError, match="set AWS_CA_BUNDLE"):
        await store.create("a", b"x")
    await store.aclose()
    plain = open_store(s3_url)
    assert await plain.get("a") is None  # nothing was sent
    await plain.aclose()


async def test_an_authority_of_ones_own_is_named_by_the_aws_setting(https, s3_url, certificate, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate.public))
    store = open_store(s3_url, endpoint_url=https)
    made = await create_lake(store, slices=1)
    assert (await open_lake(store)).lake_id == made.lake_id
    await store.aclose()


@pytest.fixture
def raw_https(certificate, monkeypatch):
    """A server that answers whatever a test wants, trusted."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate.public))
    with rawserver.raw_server(tls=certificate.of_server()) as server:
        yield server


async def test_ranges_are_read_directly_over_one_connection(raw_https):
    store = S3Store(servers.BUCKET, "lake", endpoint_url=raw_https.endpoint_url)
    await learn(raw_https, store)
    before = raw_https.connections
    for _ in range(3):
        assert await read(store) == (SIZE, BODY[FIRST : FIRST + SIZE])
    assert was_direct(raw_https.requests[-1])
    assert raw_https.connections - before == 1
    await store.aclose()


async def test_a_hung_read_is_left_at_once_and_its_thread_ends(raw_https):
    store = S3Store(servers.BUCKET, "lake", endpoint_url=raw_https.endpoint_url, data_timeout_s=300)
    await learn(raw_https, store)
    raw_https.answer = lambda head: Reply(part(head) + wanted(head)[: 1 << 20], hang=True)
    buffer = bytearray(SIZE)
    landed = trio.Event()
    token = trio.lowlevel.current_trio_token()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.read_into, KEY, FIRST, memoryview(buffer), lambda _: token.run_sync_soon(landed.set))
        await landed.wait()
        nursery.cancel_scope.cancel()
    seen = bytes(buffer)
    await until(lambda: not store._calls.data_threads.borrowed_tokens)
    assert buffer == seen
    await store.aclose()


async def test_a_server_that_stops_does_not_hold_its_thread(raw_https):
    store = S3Store(servers.BUCKET, "lake", endpoint_url=raw_https.endpoint_url, data_timeout_s=0.3)
    await learn(raw_https, store)
    answers = [lambda head: Reply(part(head) + wanted(head)[:1000], hang=True)]
    raw_https.answer = lambda head: answers.pop()(head) if answers else rawserver.well(head)
    assert await read(store) == (SIZE, BODY[FIRST : FIRST + SIZE])
    assert store.counts.get == 3
    await store.aclose()


async def test_a_certificate_that_changes_is_refused_in_botocores_words(raw_https, tmp_path):
    store = S3Store(servers.BUCKET, "lake", endpoint_url=raw_https.endpoint_url)
    await learn(raw_https, store)
    raw_https.close()
    raw_https.tls = self_signed(tmp_path).of_server()
    with pytest.raises(RefusedError, match=r"certificate verify failed.*set AWS_CA_BUNDLE"):
        await store.read_into(KEY, 0, memoryview(bytearray(10)))
    await store.aclose()


async def test_a_mount_of_a_distrusted_server_says_so_in_one_line(https, s3_url, tmp_path):
    (tmp_path / "m").mkdir()
    command = [servers.program("stepfs"), "mount", s3_url, str(tmp_path / "m"), "--endpoint-url", https]
    done = await trio.run_process(command, capture_stderr=True, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (4, 1)
    assert b"set AWS_CA_BUNDLE" in done.stderr
