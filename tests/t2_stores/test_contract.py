"""What `stepfs.store.api.Store` promises, kept by every implementation."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import trio

from stepfs.errors import CorruptError, UsageError
from stepfs.store.api import Put
from stepfs.store.probe import examine_store, probe_store


async def keys(store, *args, **kwargs):
    return [entry.key for entry in await store.list(*args, **kwargs)]


async def test_what_is_absent_reads_as_none(store):
    assert await store.get("a/b") is None
    assert await store.read_into("a/b", 0, memoryview(bytearray(4))) is None
    assert await store.list("") == []
    await store.delete(["a/b", "c"])


async def test_create_is_only_if_absent(store):
    assert await store.create("log/1", b"first") is Put.CREATED
    assert await store.create("log/1", b"second") is Put.EXISTS
    assert await store.create("log/1", b"first") is Put.EXISTS
    assert await store.get("log/1") == b"first"


async def test_create_after_delete_is_a_new_object(store):
    assert await store.create("log/1", b"first") is Put.CREATED
    await store.delete(["log/1"])
    assert await store.get("log/1") is None
    assert await store.create("log/1", b"second") is Put.CREATED
    assert await store.get("log/1") == b"second"


async def test_an_empty_object_is_an_object(store):
    assert await store.create("empty", b"") is Put.CREATED
    assert await store.create("empty", b"") is Put.EXISTS
    assert await store.get("empty") == b""
    assert await store.read_into("empty", 0, memoryview(bytearray(4))) == 0
    await store.put("empty-too", [])
    assert await store.get("empty-too") == b""


async def test_put_concatenates_parts_of_any_kind(store):
    await store.put("data/x", [b"ab", b"", bytearray(b"cd"), memoryview(b"xefx")[1:3]])
    assert await store.get("data/x") == b"abcdef"


async def test_read_into_fills_what_there_is(store):
    body = random.Random(1).randbytes(3 << 20)
    await store.put("data/x", [body])
    for offset, size in [
        (0, 10),
        (5, 0),
        (1 << 20, 2 << 20),
        (len(body) - 3, 10),
        (len(body), 10),
        (1 << 30, 1),
    ]:
        buffer = bytearray(b"?" * size)
        got = await store.read_into("data/x", offset, memoryview(buffer))
        assert got == len(body[offset : offset + size])
        assert buffer == body[offset : offset + size] + b"?" * (size - got)


async def test_get_refuses_more_than_makes_sense(store):
    await store.put("data/x", [b"12345"])
    assert await store.get("data/x", bytes_max=5) == b"12345"
    with pytest.raises(CorruptError, match="5 bytes, at most 4"):
        await store.get("data/x", bytes_max=4)


async def test_list_is_in_key_order(store):
    names = [
        "d0/b/c",
        "d0/c/a-b",
        "d0/d",
        "d1/0-1",
        "d1/1-0",
        "e",
    ]  # no name is a prefix of a sibling (FORMAT)
    for name in reversed(names):
        await store.put(name, [name.encode()])
    assert await keys(store, "") == names
    assert [entry.size for entry in await store.list("d1/")] == [6, 6]
    assert await keys(store, "d0/") == names[:3]
    assert await keys(store, "d") == names[:5]
    assert await keys(store, "", after="d0/c/a-b") == names[2:]
    assert await keys(store, "zzz") == []


async def test_list_starts_after_and_stops_at_a_limit(store):
    names = [f"log/{number:04}" for number in range(30)]
    for name in random.Random(2).sample(names, len(names)):
        await store.put(name, [b"x"])
    assert await keys(store, "log/", after="log/0009") == names[10:]
    assert await keys(store, "log/", after="log/0009", limit=3) == names[10:13]
    assert await keys(store, "log/", after="log/00095") == names[10:]
    assert await keys(store, "log/", limit=7) == names[:7]
    assert await keys(store, "log/", limit=0) == []
    assert await keys(store, "log/", after="log/0029") == []
    assert await keys(store, "log/", after="a") == names
    assert await keys(store, "log/001", after="log/0012") == names[13:20]


async def test_more_objects_than_a_page_has_list_and_delete(store):
    """Azure's pages have 5000, and 256 are deleted at a time; each takes Azurite 10 ms of CPU."""
    many = 257 if store.url.startswith("az:") else 1001
    names = [f"many/{number:05}" for number in range(many)]
    async with trio.open_nursery() as nursery:
        for part in range(16):
            nursery.start_soon(put_all, store, names[part::16])
    assert await keys(store, "many/") == names
    before = store.counts.delete
    await store.delete(iter(names))
    assert store.counts.delete - before <= (many if store.url.startswith("gs:") else 2)
    assert await store.list("many/") == []


async def put_all(store, names):
    for name in names:
        await store.put(name, [b"x"])


async def test_of_racing_creates_exactly_one_succeeds(stores):
    """50 rounds of 8 racers, all at once because losers wait whole seconds on SeaweedFS."""
    outcomes = {f"log/{turn:020}": {} for turn in range(50)}

    async def enter(store, key, racer):
        outcomes[key][racer] = await store.create(key, b"racer %d" % racer)

    async with trio.open_nursery() as nursery:
        for turn, key in enumerate(outcomes):
            for racer in range(8):
                nursery.start_soon(enter, stores[(turn + racer) % len(stores)], key, racer)
    for key, ended in outcomes.items():
        winners = [racer for racer, outcome in ended.items() if outcome is Put.CREATED]
        assert len(winners) == 1, f"{key}: {ended}"
        assert set(ended.values()) == {Put.CREATED, Put.EXISTS}
        assert await stores[-1].get(key) == b"racer %d" % winners[0]


async def test_a_big_object_arrives_whole(store):
    body = random.Random(3).randbytes((65 << 20) + 12345)  # multipart where there is such a thing
    cuts = [0, 1, 10 << 20, 40 << 20, len(body)]
    view = memoryview(body)
    await store.put("data/big", [view[a:b] for a, b in pairwise(cuts)])
    assert [entry.size for entry in await store.list("data/")] == [len(body)]
    buffer = bytearray(len(body))
    assert await store.read_into("data/big", 0, memoryview(buffer)) == len(body)
    assert buffer == body


async def test_put_replaces_nothing_half(store):
    await store.put("data/x", [b"old" * 1000])
    await store.put("data/x", [b"new" * 1000])  # a retry of the same upload
    assert await store.get("data/x") == b"new" * 1000


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", "a/.hidden", "a\n", "a b", "ä", "a" * 600])
async def test_hostile_keys_are_refused(store, key):
    for call in (
        lambda: store.get(key),
        lambda: store.create(key, b""),
        lambda: store.put(key, [b""]),
        lambda: store.read_into(key, 0, memoryview(bytearray(1))),
        lambda: store.delete([key]),
    ):
        with pytest.raises(UsageError, match="not an object key"):
            await call()


async def test_counts_are_exact(store):
    store.counts.keys = []
    await store.create("a", b"123")
    await store.create("a", b"123")
    await store.put("b", [b"4567"])
    await store.get("a")
    await store.get("nothing")
    await store.read_into("b", 1, memoryview(bytearray(2)))
    await store.list("")
    await store.delete(["a", "b"])
    counts = store.counts
    deletes = 2 if store.url.startswith("gs:") else 1
    assert (counts.create, counts.put, counts.get, counts.list, counts.delete) == (2, 1, 3, 1, deletes)
    assert counts.requests == 7 + deletes
    assert (counts.bytes_read, counts.bytes_written) == (5, 10)
    assert counts.keys[:-2] == [
        *[("create", "a")] * 2, ("put", "b"), ("get", "a"), ("get", "nothing"), ("get", "b"), ("list", ""),
    ]  # fmt: skip
    assert sorted(counts.keys[-2:]) == [("delete", "a"), ("delete", "b")]


async def test_an_honest_store_passes_the_probes_and_nothing_stays(store):
    await probe_store(store, thorough=False)
    assert store.counts.requests <= 4
    report = await examine_store(store)
    assert report.fit, report
    assert [check.name for check in report.checks] == [
        "conditional create", "racing creates", "read after write", "list after write",
    ]  # fmt: skip
    assert report.refusal() == ""
    assert await store.list("probe/") == []


async def test_a_read_tells_what_has_landed_when_it_is_there(store):
    body = bytes(range(256)) * (12 << 10)  # several pieces
    await store.put("data/x", [body])
    buffer = bytearray(len(body))
    told = []

    def landed(stop):
        assert buffer[:stop] == body[:stop]
        told.append(stop)

    assert await store.read_into("data/x", 0, memoryview(buffer), landed) == len(body)
    assert told == sorted(set(told))
    assert told[-1] == len(body)


async def test_a_cancelled_read_leaves_the_buffer_alone(store):
    await store.put("data/x", [b"x" * (8 << 20)])
    buffer = bytearray(8 << 20)
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.read_into("data/x", 0, memoryview(buffer))
    seen = bytes(buffer)
    assert await store.get("data/x") == b"x" * (8 << 20)
    assert bytes(buffer) == seen
