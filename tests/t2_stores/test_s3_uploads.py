"""Big uploads, batched deletes and cancelled requests against a real S3 server: nothing is left behind, nothing is half done."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import faultproxy
import pytest
import servers
import trio
from at_work import until
from crc32c import crc32c
from faultproxy import (
    ERROR_500,
    LOST_REQUEST,
    RESET_AFTER,
    RESET_BEFORE,
    FaultProxy,
)

from stepfs.errors import RefusedError, StoreUnreachableError
from stepfs.store.api import Put
from stepfs.store.opening import open_store
from stepfs.store.s3.s3_store import S3Store
from stepfs.store.s3.upload import SINGLE_BYTES_MAX
from stepfs.store.settings import COMMIT_THREADS_MAX, CONTROL_THREADS_MAX, DATA_THREADS_MAX


async def test_keys_that_a_server_puts_off_are_deleted_again(direct, monkeypatch):
    """S3 answers 200 with an error for a single key now and then; botocore does not look at those."""
    await direct.put("a", [b"x"])
    await direct.put("b", [b"x"])
    real, answers = direct._delete, [{"b": "InternalError"}, {"b": "SlowDown"}, {}]
    asked = []

    def delete(keys):
        asked.append(tuple(keys))
        real(keys)
        return answers.pop(0)

    monkeypatch.setattr(direct, "_delete", delete)
    await direct.delete(["a", "b"])
    assert asked == [("a", "b"), ("b",), ("b",)]
    monkeypatch.setattr(direct, "_delete", lambda keys: dict.fromkeys(keys, "InternalError"))
    with pytest.raises(StoreUnreachableError, match=r"cannot delete a .* puts it off"):
        await direct.delete(["a"])
    monkeypatch.setattr(direct, "_delete", lambda keys: {"a": "InternalError", "b": "AccessDenied"})
    with pytest.raises(RefusedError, match=r"cannot delete b .*AccessDenied.*rights"):
        await direct.delete(["a", "b"])


async def test_a_big_upload_survives_trouble_and_is_verified(proxied, direct, fault_proxy):
    body = os.urandom(100 << 20)
    for trouble, part in [
        (RESET_BEFORE, "partNumber=2"),
        (ERROR_500, "partNumber=3"),
        (RESET_AFTER, "partNumber=4"),
    ]:
        fault_proxy.once("PUT", part, trouble)
    fault_proxy.once("POST", "uploadId", RESET_AFTER)
    await proxied.put("data/big", [body[: 30 << 20], body[30 << 20 :]])
    buffer = bytearray(len(body))
    assert await direct.read_into("data/big", 0, memoryview(buffer)) == len(body)
    assert buffer == body
    assert proxied.counts.put == len(fault_proxy.handled)


async def test_bytes_that_are_not_those_of_the_checksum_never_become_an_object(direct):
    """The producer computes it when it builds the object, so memory that rots until the upload is found out, too."""
    await direct.put("a", [b"some", b" bytes"], crc32c=crc32c(b"some bytes"))
    assert await direct.get("a") == b"some bytes"
    with pytest.raises(StoreUnreachableError, match="cannot write b"):
        await direct.put("b", [b"some", b" bytes"], crc32c=crc32c(b"some bites"))
    assert await direct.get("b") is None


async def test_a_failed_big_upload_is_given_back(proxied, direct, fault_proxy):
    def break_pieces(method, part):
        for _ in range(40):
            fault_proxy.once(method, part, ERROR_500)

    break_pieces("PUT", "partNumber=2")
    with pytest.raises(StoreUnreachableError, match="cannot write data/big"):
        await proxied.put("data/big", [b"x" * (SINGLE_BYTES_MAX + 1)])
    assert fault_proxy.handled[-1].method == "DELETE"  # after the last piece
    assert await direct.list("") == []


async def test_a_cancelled_big_upload_is_given_back(proxied, direct, fault_proxy):
    fault_proxy.once("PUT", "partNumber=2", faultproxy.Trouble("slow", delay_s=1.0))
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(proxied.put, "data/big", [b"x" * (200 << 20)])
            while len(fault_proxy.handled) < 4:  # noqa: ASYNC110 - until pieces are on their way
                await trio.sleep(0.01)
            scope.cancel()
    assert fault_proxy.handled[-1].method == "DELETE"
    assert len(fault_proxy.handled) < 14  # not all of the 13 pieces
    assert await direct.list("") == []


async def test_a_cancelled_upload_returns_at_once_and_never_becomes_other_bytes(proxied, direct, fault_proxy):
    fault_proxy.once("PUT", "data/1", faultproxy.Trouble("slow", delay_s=0.5))
    body = bytearray(b"x" * (32 << 20))
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(proxied.put, "data/1", [body])
            while not fault_proxy.handled:  # noqa: ASYNC110 - until it is on its way
                await trio.sleep(0.01)
            scope.cancel()
    body[:] = b"y" * len(body)
    await until(lambda: not proxied._calls.data_threads.borrowed_tokens)
    assert len(fault_proxy.handled) == 1
    assert await direct.get("data/1") is None


async def test_a_cancelled_read_lets_go_of_the_buffer_and_the_connection(proxied, direct, fault_proxy):
    await direct.put("data/1", [b"x" * (8 << 20)])
    fault_proxy.once("GET", "data/1", faultproxy.slowly(1 << 20))
    buffer = bytearray(8 << 20)
    started = trio.current_time()
    with trio.move_on_after(1.0):
        await proxied.read_into("data/1", 0, memoryview(buffer))
    assert trio.current_time() - started < 3.0  # not the timeout, nor the 8 s transfer
    buffer[:] = b"m" * len(buffer)
    await until(lambda: not proxied._calls.data_threads.borrowed_tokens)
    assert buffer == b"m" * len(buffer)


async def test_a_cancelled_create_still_reports_how_it_ended(proxied, fault_proxy):
    fault_proxy.once("PUT", "log/1", faultproxy.Trouble("late answer", delay_s=0.5))
    with trio.CancelScope() as scope:
        scope.cancel()
        await trio.lowlevel.cancel_shielded_checkpoint()
        outcome = None
        try:
            outcome = await proxied.create("log/1", b"x")
        except trio.Cancelled:
            assert not fault_proxy.handled  # cancelled before it was sent
            raise
    assert outcome in {None, Put.CREATED}


UPLOADS = DATA_THREADS_MAX + 8
DATA_TIMEOUT_S = 250.0  # longer than the test: uploads that hang are given up by its end alone


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
