"""What only a network and an S3 server can do wrong, on real bytes: a fault proxy in front of SeaweedFS."""

from __future__ import annotations

import os
from functools import partial

import faultproxy
import pytest
import servers
import trio
from at_work import until
from faultproxy import (
    CONFLICT_409,
    ERROR_500,
    ERROR_500_APPLIED,
    FALSE_412,
    LOST_REQUEST,
    LOST_RESPONSE,
    RESET_AFTER,
    RESET_BEFORE,
    SHORT_BODY,
    SKEWED_403,
    SLOW_DOWN_503,
    TOO_MANY_429,
)
from rawserver import Reply

from stepfs.errors import CorruptError, RefusedError, StoreSilentError, StoreUnreachableError
from stepfs.store.api import Put
from stepfs.store.s3.s3_store import S3Store
from stepfs.store.silence import Silence


async def test_the_proxy_alone_changes_nothing(proxied, direct, fault_proxy):
    assert await proxied.create("log/1", b"x") is Put.CREATED
    assert await proxied.create("log/1", b"x") is Put.EXISTS
    await proxied.put("data/1", [b"y" * (5 << 20)])
    assert await direct.get("data/1") == await proxied.get("data/1") == b"y" * (5 << 20)
    assert [entry.key for entry in await proxied.list("")] == ["data/1", "log/1"]
    await proxied.delete(["data/1"])
    assert await direct.get("data/1") is None
    assert {handled.trouble for handled in fault_proxy.handled} == {""}


@pytest.mark.parametrize("trouble", [LOST_RESPONSE, RESET_AFTER, ERROR_500_APPLIED], ids=lambda t: t.name)
async def test_an_ambiguous_create_is_unknown_and_happened(hasty, direct, fault_proxy, trouble):
    """Hazard 2: exactly one attempt; a second one would report 412 for our own success."""
    fault_proxy.once("PUT", "log/1", trouble)
    assert await hasty.create("log/1", b"mine") is Put.UNKNOWN
    assert await direct.get("log/1") == b"mine"
    assert hasty.counts.create == 1
    assert [handled.method for handled in fault_proxy.handled] == ["PUT"]


@pytest.mark.parametrize("trouble", [LOST_REQUEST, RESET_BEFORE, ERROR_500, SLOW_DOWN_503], ids=lambda t: t.name)
async def test_a_create_that_did_not_happen_is_unknown_too(hasty, direct, fault_proxy, trouble):
    fault_proxy.once("PUT", "log/1", trouble)
    assert await hasty.create("log/1", b"mine") is Put.UNKNOWN
    assert await direct.get("log/1") is None
    assert hasty.counts.create == 1


async def test_a_create_may_land_after_it_was_given_up(proxied, direct, fault_proxy):
    fault_proxy.once("PUT", "log/1", faultproxy.delayed(0.3))
    assert await proxied.create("log/1", b"mine") is Put.UNKNOWN
    with trio.fail_after(10):
        while await direct.get("log/1") is None:  # noqa: ASYNC110 - the server tells nobody
            await trio.sleep(0.05)


async def test_409_is_retry_and_412_is_exists(proxied, fault_proxy):
    """Hazard 3: a conflict is undecided, not taken."""
    fault_proxy.once("PUT", "log/1", CONFLICT_409)
    fault_proxy.once("PUT", "log/1", FALSE_412)
    assert await proxied.create("log/1", b"mine") is Put.RETRY
    assert await proxied.create("log/1", b"mine") is Put.EXISTS
    assert await proxied.create("log/1", b"mine") is Put.CREATED


@pytest.mark.parametrize(
    "trouble", [RESET_BEFORE, RESET_AFTER, ERROR_500, SLOW_DOWN_503, LOST_RESPONSE], ids=lambda t: t.name
)
async def test_everything_but_create_is_retried_and_each_attempt_counted(hasty, direct, fault_proxy, trouble):
    await direct.put("a", [b"x"])
    calls = [
        ("GET", "/a", partial(hasty.get, "a")),
        ("GET", "list-type", partial(hasty.list, "")),
        ("PUT", "/b", partial(hasty.put, "b", [b"y"])),
        ("POST", "delete", partial(hasty.delete, ["c"])),
    ]
    async with trio.open_nursery() as nursery:  # at once: a lost response costs its whole deadline
        for method, part, call in calls:
            fault_proxy.once(method, part, trouble)
            nursery.start_soon(call)
    assert [getattr(hasty.counts, verb) for verb in ("get", "list", "put", "delete")] == [2, 2, 2, 2]
    assert hasty.counts.requests == len(fault_proxy.handled)


async def test_a_short_body_is_asked_for_again_from_where_it_broke(proxied, direct, fault_proxy):
    body = os.urandom(4 << 20)
    await direct.put("data/1", [body])
    fault_proxy.once("GET", "data/1", SHORT_BODY)
    fault_proxy.once("GET", "data/1", SHORT_BODY)
    buffer = bytearray(len(body))
    assert await proxied.read_into("data/1", 0, memoryview(buffer)) == len(body)
    assert buffer == body
    assert proxied.counts.get == 3
    assert proxied.counts.bytes_read == len(body)
    fault_proxy.once("GET", "data/1", SHORT_BODY)
    assert await proxied.get("data/1") == body


async def test_a_body_that_never_comes_whole_is_unreachable(proxied, direct, fault_proxy):
    await direct.put("data/1", [b"x" * 1000])
    fault_proxy.randomly({SHORT_BODY: 1.0})
    with pytest.raises(StoreUnreachableError, match="cannot read data/1"):
        await proxied.get("data/1")
    fault_proxy.randomly({})


async def test_throttling_that_lasts_is_unreachable_and_not_refused(proxied, direct, fault_proxy):
    await direct.put("data/1", [b"x" * 1000])
    fault_proxy.randomly({TOO_MANY_429: 1.0})
    with pytest.raises(StoreUnreachableError, match="cannot read data/1"):
        await proxied.read_into("data/1", 0, memoryview(bytearray(1000)))
    assert await proxied.create("log/1", b"mine") is Put.UNKNOWN
    fault_proxy.randomly({})


async def test_a_request_signed_before_a_suspension_is_signed_again(proxied, direct, fault_proxy):
    await direct.put("data/1", [b"x" * 1000])
    fault_proxy.once("GET", "data/1", SKEWED_403)
    assert await proxied.get("data/1") == b"x" * 1000
    fault_proxy.once("PUT", "log/1", SKEWED_403)
    assert await proxied.create("log/1", b"mine") is Put.CREATED
    fault_proxy.randomly({SKEWED_403: 1.0})  # the clock is wrong
    with pytest.raises(RefusedError, match="clock is wrong"):
        await proxied.get("data/1")
    fault_proxy.randomly({})


async def test_get_does_not_read_what_it_refuses(proxied, direct):
    await direct.put("data/1", [b"x" * (8 << 20)])
    with pytest.raises(CorruptError, match="8388608 bytes, at most 1000"):
        await proxied.get("data/1", bytes_max=1000)
    assert proxied.counts.bytes_read == 0


async def test_a_body_without_a_length_is_read_as_far_as_makes_sense(raw_s3, raw_store):
    """A proxy that sends in chunks leaves the length out; it was a KeyError."""
    pieces = b"".join(b"3e8\r\n%s\r\n" % (b"x" * 1000) for _ in range(3000))
    raw_s3.answer = lambda _: Reply(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n")
    store = raw_store()
    assert await store.get("log/1") == b"x" * 3_000_000
    with pytest.raises(CorruptError, match="more than 2999999 bytes"):
        await store.get("log/1", bytes_max=2_999_999)


async def test_a_read_given_up_for_silence_leaves_the_buffer_alone(direct, fault_proxy):
    await direct.put("data/1", [b"x" * 1000])
    silence = Silence(lambda _: None, say_after_s=0.01, give_up_after_s=0.1)
    prefix = direct.url.removeprefix(f"s3://{servers.BUCKET}/")
    store = S3Store(servers.BUCKET, prefix, endpoint_url=fault_proxy.endpoint_url, silence=silence)
    buffer = bytearray(1000)
    fault_proxy.hold()
    with pytest.raises(StoreSilentError):
        await store.read_into("data/1", 0, memoryview(buffer))
    fault_proxy.release()
    await until(lambda: not store._calls.data_threads.borrowed_tokens)
    assert buffer == bytes(1000)
    await store.aclose()
