"""Answers that ask for fewer requests are counted, also those that a retry makes good: a fleet slows down by them."""

from __future__ import annotations

import pytest
import servers
from faultproxy import ERROR_500, SLOW_DOWN_503, TOO_MANY_429

from stepfs.store.api import Put
from stepfs.store.s3.s3_store import S3Store


@pytest.fixture
async def store(fault_proxy, s3_url):
    prefix = s3_url.removeprefix(f"s3://{servers.BUCKET}/")
    store = S3Store(servers.BUCKET, prefix, endpoint_url=fault_proxy.endpoint_url)
    yield store
    await store.aclose()


@pytest.mark.parametrize(("trouble", "counted"), [(SLOW_DOWN_503, 1), (TOO_MANY_429, 1), (ERROR_500, 0)])
async def test_a_throttled_request_is_counted_though_its_retry_succeeds(store, fault_proxy, trouble, counted):
    fault_proxy.once("GET", "a/b", trouble)
    assert await store.get("a/b") is None
    assert (store.counts.get, store.counts.throttled) == (2, counted)


async def test_a_throttled_create_is_counted_too(store, fault_proxy):
    fault_proxy.once("PUT", "a/b", SLOW_DOWN_503)
    assert await store.create("a/b", b"x") is Put.UNKNOWN
    assert store.counts.throttled == 1
