"""Prefixes with characters that URLs, signatures and LIST write otherwise, on each server: hive's names are common."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from directreads import asks_directly

from stepfs.errors import UsageError
from stepfs.store.api import Put
from stepfs.store.opening import open_store

ODD = "dt=2026-11-01 00/größe+é~1/日本.v2"


@pytest.mark.parametrize("kind", ["file", "s3", "gs", pytest.param("az", marks=pytest.mark.nightly)])
async def test_every_verb_works_below_an_odd_prefix_and_finds_nothing_of_others(request, kind) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    async with aclosing(open_store(f"{url}/{ODD}")) as store, aclosing(open_store(f"{url}/{ODD}+")) as other:
        assert await store.create("log/1", b"one") is Put.CREATED
        assert await store.create("log/1", b"two") is Put.EXISTS
        assert await other.get("log/1") is None
        body = bytes(range(256)) * 64
        await store.put("data/a=1-x", [body, b"end"])
        for _ in range(3):  # at first by botocore, then over a socket of the store's own
            half = bytearray(len(body))
            assert await store.read_into("data/a=1-x", 3, memoryview(half)) == len(half)
            assert half == body[3:] + b"end"
        assert kind != "s3" or asks_directly(store)
        assert [entry.key for entry in await store.list("", ages=True)] == ["data/a=1-x", "log/1"]
        assert [entry.key for entry in await store.list("", after="data/a=1-x", limit=1)] == ["log/1"]
        assert not await other.list("")
        await store.delete(["log/1", "data/a=1-x", "none"])
        assert not await store.list("")


@pytest.mark.parametrize("place", ["s3://bucket/", "gs://bucket/", "az://account/container/"])
@pytest.mark.parametrize(
    "prefix", ["a//b", ".", "a/../b", ".b", "a%20b", "a\\b", "a*", "a\n", "a\x85b", " a", "a /b", "\ud800"]
)
def test_what_no_prefix_has_is_refused_with_what_it_may_have(place, prefix) -> None:
    with pytest.raises(UsageError, match="its parts take letters, digits, - _ = "):
        open_store(place + prefix)


@pytest.mark.parametrize("prefix", ["me@home", "secret@x", "run?versionId=secret"])
def test_what_may_be_a_credential_is_refused_and_not_repeated(prefix) -> None:
    with pytest.raises(UsageError, match=r"and '@' and '\?' not into a prefix; check AWS_ACCESS_KEY_ID") as refused:
        open_store(f"s3://bucket/{prefix}")
    assert prefix not in str(refused.value)


def test_a_prefix_is_as_long_as_its_bytes() -> None:
    assert open_store(f"s3://bucket/{'ü' * 256}").url.endswith("ü")
    with pytest.raises(UsageError, match="and all together 512 bytes"):
        open_store(f"s3://bucket/{'ü' * 257}")
