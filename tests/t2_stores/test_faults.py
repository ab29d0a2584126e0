"""What a network and a server can do wrong to each kind of store, on real bytes: a fault proxy before each server."""

from __future__ import annotations

import os
from functools import partial

import faultproxy
import pytest
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
    SLOW_DOWN_503,
    TOO_MANY_429,
)

from stepfs.errors import CorruptError, RefusedError, StoreSilentError, StoreUnreachableError
from stepfs.store.api import Put
from stepfs.store.cloud import cloud_store
from stepfs.store.s3 import s3_store
from stepfs.store.silence import Silence


@pytest.mark.parametrize("trouble", [LOST_RESPONSE, RESET_AFTER, ERROR_500_APPLIED], ids=lambda t: t.name)
async def test_an_ambiguous_create_is_unknown_and_happened(network, trouble):
    """Hazard 2: exactly one attempt; a second one would report a taken key for our own success."""
    store = network.hasty()
    network.proxy.once("PUT", "log", trouble)
    assert await store.create("log/1", b"mine") is Put.UNKNOWN
    assert await network.direct.get("log/1") == b"mine"
    assert store.counts.create == 1
    assert [handled.method for handled in network.proxy.handled] == ["PUT"]


@pytest.mark.parametrize("trouble", [LOST_REQUEST, RESET_BEFORE, ERROR_500, SLOW_DOWN_503], ids=lambda t: t.name)
async def test_a_create_that_did_not_happen_is_unknown_too(network, trouble):
    store = network.hasty()
    network.proxy.once("PUT", "log", trouble)
    assert await store.create("log/1", b"mine") is Put.UNKNOWN
    assert await network.direct.get("log/1") is None
    assert store.counts.create == 1


async def test_a_create_may_land_after_it_was_given_up(network):
    store = network.through()
    network.proxy.once("PUT", "log", faultproxy.delayed(0.3))
    assert await store.create("log/1", b"mine") is Put.UNKNOWN
    with trio.fail_after(10):
        while await network.direct.get("log/1") is None:  # noqa: ASYNC110 - the server tells nobody
            await trio.sleep(0.05)


async def test_409_is_retry_and_412_is_exists(network):
    store = network.through()
    network.proxy.once("PUT", "log", CONFLICT_409)
    network.proxy.once("PUT", "log", FALSE_412)
    assert await store.create("log/1", b"mine") is Put.RETRY
    assert await store.create("log/1", b"mine") is Put.EXISTS
    assert await store.create("log/1", b"mine") is Put.CREATED


@pytest.mark.parametrize(
    "trouble", [RESET_BEFORE, RESET_AFTER, ERROR_500, SLOW_DOWN_503, LOST_RESPONSE], ids=lambda t: t.name
)
async def test_everything_but_create_is_retried_and_each_attempt_counted(network, trouble):
    await network.direct.put("a", [b"x"])
    lost = trouble is LOST_RESPONSE
    store = network.hasty() if lost else network.through()  # a busy server may be too slow for the hasty one, too
    slash, erase = ("%2F", "DELETE") if network.url.startswith("gs") else ("/", "POST")
    calls = [
        ("GET", f"{slash}a", partial(store.get, "a")),
        ("GET", "list", partial(store.list, "")),
        ("PUT", f"{slash}b", partial(store.put, "b", [b"y"])),
        (erase, "", partial(store.delete, ["c"])),
    ]
    async with trio.open_nursery() as nursery:  # at once: a lost response costs its whole deadline
        for method, part, call in calls:
            network.proxy.once(method, part, trouble)
            nursery.start_soon(call)
    counts = [getattr(store.counts, verb) for verb in ("get", "list", "put", "delete")]
    assert counts == [2, 2, 2, 2] or (lost and min(counts) >= 2)
    assert store.counts.requests == len(network.proxy.handled)


async def test_a_delete_that_took_long_is_left_to_the_caller(network, monkeypatch):
    """Hazard 13: the store may have been put back to an older copy since."""
    for room in (s3_store, cloud_store):
        monkeypatch.setattr(room, "DELETE_RESENT_S_MAX", 0.0)
    store = network.through()
    network.proxy.once("DELETE" if network.url.startswith("gs") else "POST", "", ERROR_500)
    with pytest.raises(StoreUnreachableError, match="delete a"):
        await store.delete(["a"])
    assert store.counts.delete == 1
    await store.delete(["a"])


async def test_a_short_body_is_asked_for_again_from_where_it_broke(network):
    body = os.urandom(4 << 20)
    await network.direct.put("data/1", [body])
    store = network.through()
    network.proxy.once("GET", "data", SHORT_BODY)
    network.proxy.once("GET", "data", SHORT_BODY)
    buffer, told = bytearray(len(body)), []
    assert await store.read_into("data/1", 0, memoryview(buffer), told.append) == len(body)
    assert buffer == body
    assert told == sorted(set(told))
    assert (store.counts.get, store.counts.bytes_read) == (3, len(body))
    network.proxy.once("GET", "data", SHORT_BODY)
    assert await store.get("data/1") == body


async def test_a_body_that_never_comes_whole_is_unreachable(network):
    await network.direct.put("data/1", [b"x" * 1000])
    store = network.through()
    network.proxy.randomly({SHORT_BODY: 1.0})
    with pytest.raises(StoreUnreachableError, match="cannot read data/1"):
        await store.get("data/1")
    network.proxy.randomly({TOO_MANY_429: 1.0})
    with pytest.raises(StoreUnreachableError, match="cannot read data/1" if network.url.startswith("s3") else "429"):
        await store.read_into("data/1", 0, memoryview(bytearray(1000)))
    assert await store.create("log/1", b"mine") is Put.UNKNOWN


async def test_get_does_not_read_what_it_refuses(network):
    await network.direct.put("data/1", [b"x" * (8 << 20)])
    store = network.through()
    with pytest.raises(CorruptError, match="8388608 bytes, at most 1000"):
        await store.get("data/1", bytes_max=1000)
    assert store.counts.bytes_read == 0


async def test_a_read_given_up_for_silence_leaves_the_buffer_alone(network):
    await network.direct.put("data/1", [b"x" * 1000])
    silence = Silence(lambda _: None, say_after_s=0.01, give_up_after_s=0.1)
    store = network.watched(silence)
    buffer = bytearray(1000)
    network.proxy.hold()
    with pytest.raises(StoreSilentError):
        await store.read_into("data/1", 0, memoryview(buffer))
    network.proxy.release()
    await until(lambda: not store._calls.data_threads.borrowed_tokens)
    assert buffer == bytes(1000)


async def test_what_an_abandoned_upload_sends_is_what_it_was_given(cloud):
    store = cloud.through()
    body = bytearray(b"old" * 1000)
    cloud.proxy.hold()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(store.put, "data/1", [body]))
        await until(lambda: cloud.proxy.handled)
        nursery.cancel_scope.cancel()
    body[:] = b"new" * 1000
    cloud.proxy.release()
    await until(lambda: not store._calls.data_threads.borrowed_tokens)
    assert await cloud.direct.get("data/1") == b"old" * 1000


async def test_a_large_object_is_put_in_parts_which_obstore_sends_again(cloud, monkeypatch):
    monkeypatch.setattr(cloud_store, "SINGLE_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(cloud_store, "_PART_BYTES", 5 << 20)
    body = os.urandom(12 << 20)
    store = cloud.through()
    cloud.proxy.once("PUT", "data", SLOW_DOWN_503)
    await store.put("data/1", [body[: 1 << 20], memoryview(body)[1 << 20 :]])
    assert await cloud.direct.get("data/1") == body
    assert store.counts.put == 4  # beside the begin or the end, and obstore's own retry
    assert store.counts.bytes_written == len(body)


@pytest.mark.parametrize("parts", [False, True], ids=["one request", "parts"])
async def test_an_upload_that_is_refused_is_not_there(cloud, monkeypatch, parts):
    if parts:
        monkeypatch.setattr(cloud_store, "SINGLE_BYTES_MAX", 1 << 10)
    store = cloud.through()
    cloud.proxy.randomly({FALSE_412: 1.0})
    with pytest.raises(RefusedError, match="cannot write data/1"):
        await store.put("data/1", [b"x" * 2000])
    cloud.proxy.randomly({})
    assert await cloud.direct.list("") == []


async def test_deletes_of_which_some_are_absent_delete_the_others(cloud):
    for number in range(3):
        await cloud.direct.put(f"a/{number}", [b"x"])
    await cloud.direct.delete(["a/x", "a/0", "a/y", "a/1", "a/z", "a/2"])
    assert await cloud.direct.list("") == []


async def put_many(store, count):
    async def put(lane):
        for number in range(lane, count, 16):
            await store.put(f"log/{number:05}", [b"x"])

    async with trio.open_nursery() as nursery:
        for lane in range(16):
            nursery.start_soon(put, lane)


@pytest.mark.parametrize(
    ("cloud", "keys", "requests"),
    # Azurite ignores `startFrom`, and its pages are five times as long.
    [("gs", 2100, 1), pytest.param("az", 6000, 2, marks=pytest.mark.nightly)],
    indirect=["cloud"],
)
async def test_a_list_begins_near_its_end(cloud, keys, requests):
    await put_many(cloud.direct, keys)
    store = cloud.through()
    found = await store.list("log/", after=f"log/{keys - 3:05}", limit=5)
    assert [entry.key for entry in found] == [f"log/{keys - 2:05}", f"log/{keys - 1:05}"]
    assert len(cloud.proxy.handled) == store.counts.list == requests


@pytest.mark.parametrize("cloud", ["gs"], indirect=True)
async def test_a_list_that_breaks_goes_on_behind_what_it_has(cloud):
    await put_many(cloud.direct, 1500)
    store = cloud.through()
    cloud.proxy.once("GET", "list", SHORT_BODY)
    cloud.proxy.once("GET", "continuation", RESET_BEFORE)
    found = await store.list("log/")
    assert [entry.key for entry in found] == [f"log/{number:05}" for number in range(1500)]
