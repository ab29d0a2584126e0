"""What a producer takes, what it refuses, and what it waits for."""

from __future__ import annotations

import array
import ctypes
import io
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import trio
from doubles.faulty_store import FaultyStore
from ledger import payload
from producer_world import SLICES, World, append, feed, simulate
from scenarios import scenario

from stepfs.errors import AbsentError, FencedError, RefusedError, UsageError
from stepfs.format.ids import POSITION_BYTES_MAX, SliceIndex, Step
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Buffer, Put
from stepfs_producer import AsyncProducer
from stepfs_producer.commit.uploads import UNCOMMITTED_FACTOR

BATCH = [b"x"] * SLICES


@scenario(simulate)
async def test_a_lake_is_never_created_and_a_lying_store_never_trusted(world: World) -> None:
    class Liar(FaultyStore):
        async def create(self, key: str, body: bytes) -> Put:
            await self.put(key, [body])
            return Put.CREATED

    with pytest.raises(AbsentError, match="stepfs init"):
        async with AsyncProducer("memory://", producer_id="p", store=FaultyStore()):
            raise AssertionError("started")
    with pytest.raises(RefusedError):
        async with world.producer("p", Liar(world.shared, actor="liar")):
            raise AssertionError("started")
    world.check()


@scenario(simulate)
async def test_not_started_closed_and_used_twice(world: World) -> None:
    producer = world.producer("p")
    with pytest.raises(UsageError, match="has not been started"):
        await producer.append(BATCH, position=0)
    async with producer:
        with pytest.raises(UsageError, match="runs once"):
            await producer.__aenter__()
    with pytest.raises(UsageError, match="closed"):
        await producer.append(BATCH, position=0)
    with pytest.raises(UsageError, match="runs once"):
        await producer.__aenter__()


@scenario(simulate)
async def test_append_waits_for_nothing_but_the_budget(world: World) -> None:
    """With commits out of reach appends go on until the bound, and stop there, and go on after."""
    store = world.store("p")
    stuck = trio.Event()
    async with world.producer("p", store, max_pending_bytes=2_000) as producer:
        create = store.create

        async def stuck_create(key: str, body: bytes) -> Put:
            await stuck.wait()
            return await create(key, body)

        store.create = stuck_create  # type: ignore[method-assign]
        with trio.move_on_after(60.0):
            await feed(producer, 10_000)
        pending = producer.running.pending
        bound = UNCOMMITTED_FACTOR * 2_000
        assert bound - 200 < pending.uncommitted_bytes <= bound
        stopped_at = producer.next_seq
        assert producer.committed_seq == 0
        stuck.set()
        for number in range(stopped_at, stopped_at + 50):
            await append(producer, number)
    world.check(p=stopped_at + 50)


@scenario(simulate)
async def test_memory_is_bounded_while_uploads_are_slow(world: World) -> None:
    store = world.store("p")
    most = 0
    async with world.producer("p", store, max_pending_bytes=1_000, uploads=3) as producer:
        store._latency = lambda verb, size, rng: 1.0 if verb == "put" else 0.01
        for number in range(100):
            await append(producer, number)
            most = max(most, producer.running.pending.memory_bytes)
    assert 800 < most <= 1_000
    world.check(p=100)


@scenario(simulate)
async def test_a_cancelled_append_never_happened(world: World) -> None:
    store = world.store("p")
    async with world.producer("p", store, max_pending_bytes=100) as producer:
        store._latency = lambda verb, size, rng: 5.0 if verb == "put" else 0.01
        await append(producer, 0)
        with trio.move_on_after(1.0) as scope:
            await append(producer, 1)
        assert scope.cancelled_caught
        assert producer.next_seq == 1
        await append(producer, 1)
    world.check(p=2)


@scenario(simulate)
async def test_concurrent_appends_get_dense_seqs(world: World) -> None:
    world.shared.watch = None
    async with world.producer("p", max_pending_bytes=50) as producer:
        seqs: list[int] = []

        async def one(number: int) -> None:
            seqs.append(await producer.append([b"%d" % number] * SLICES, position=number))

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one, number)
        assert sorted(seqs) == list(range(40))


@scenario(simulate)
async def test_every_append_that_waits_is_told_when_the_producer_has_failed(world: World) -> None:
    """Also those that had not reached the place where one waits when it failed."""
    store = world.store("p")
    told = 0
    with suppress(FencedError):
        async with world.producer("p", store, max_pending_bytes=100) as producer:
            store._latency = lambda verb, size, rng: 5.0 if verb == "put" else 0.01
            await append(producer, 0)

            async def one(number: int) -> None:
                nonlocal told
                try:
                    await append(producer, number)
                except FencedError:
                    told += 1

            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for number in range(1, 4):
                        nursery.start_soon(one, number)
                    await trio.sleep(1)
                    producer._fail(FencedError("a newer one"))
    assert told == 3


@scenario(simulate)
async def test_the_first_failure_is_kept_and_ends_all_other_work(world: World) -> None:
    store = world.store("p")
    with pytest.raises(FencedError, match="the first"):
        async with world.producer("p", store, uploads=1) as producer:
            store._latency = lambda verb, size, rng: 5.0 if verb == "put" else 0.01
            for number in range(5):
                await append(producer, number)
            await trio.sleep(1.0)
            producer._fail(FencedError("the first"))
            producer._fail(AbsentError("the second"))
            await trio.sleep(0.0)
            before = store.counts.requests
            await trio.sleep(60.0)
            assert store.counts.requests == before
            await producer.flush()


@pytest.mark.logs("held back by max_lead")
@scenario(simulate)
async def test_producers_stop_at_their_lead_over_the_slowest_group(world: World):
    groups = [Group.of(world.store("trainer"), world.identity, name) for name in ("fast", "slow")]
    await groups[0].add(Step(1000))
    await groups[1].add(Step(0))
    async with world.producer("p", max_lead=10) as producer:
        with trio.move_on_after(60.0):
            await feed(producer, 100)
        await producer.flush()
        first = producer.next_seq
        assert 8 <= first <= 12
        await groups[1].add(Step(5), keep=1)
        with trio.move_on_after(60.0):
            for number in range(first, 100):
                await append(producer, number)
        assert first + 3 <= producer.next_seq <= first + 7
        await groups[1].retire()
        for number in range(producer.next_seq, 60):
            await append(producer, number)
    world.check(p=60)


@pytest.mark.logs("no consumer group is registered")
@scenario(simulate)
async def test_without_any_group_the_lead_counts_from_the_first_live_step(world: World, caplog):
    async with world.producer("p", max_lead=10) as producer:
        with trio.move_on_after(60.0):
            await feed(producer, 100)
        await producer.flush()
        assert producer.next_seq == 10
    assert "no consumer group is registered; mount with --group" in caplog.text


@scenario(simulate)
async def test_a_trickle_is_committed_at_once(world: World) -> None:
    async with world.producer("p") as producer:
        for number in range(10):
            appended_s = trio.current_time()
            await append(producer, number)
            await producer.flush()
            assert trio.current_time() - appended_s < 0.2
            await trio.sleep(7.0)


@scenario(simulate)
async def test_a_producer_overwrites_nothing_and_deletes_only_its_probes(world: World) -> None:
    class Once(FaultyStore):
        async def put(self, key: str, parts: Sequence[Buffer], *, crc32c: int | None = None) -> None:
            assert key not in self.shared.objects
            await super().put(key, parts, crc32c=crc32c)

    for until in (300, 600):
        async with world.producer("p", Once(world.shared, actor="p"), max_lead=10_000) as producer:
            await feed(producer, until)
            if until == 600:
                await producer.retire()
    rooms = {key.removeprefix(f"{world.identity.lake_id}/").split("/")[0] for key in world.shared.objects}
    assert {"log", "index", "snapshot"} <= rooms
    deleted = [key for event in world.shared.trace if event.verb == "delete" for key in event.keys]
    assert deleted
    assert all(key.startswith("probe/") for key in deleted)


@pytest.mark.parametrize(
    ("options", "message"), [
        ({"producer_id": ""}, "1 to 256 bytes"),
        ({"producer_id": "é" * 129}, "1 to 256 bytes"), ({"producer_id": "a\nb"}, "printable"),
        ({"max_pending_bytes": 0}, "max_pending_bytes=0"), ({"uploads": 0}, "uploads=0"),
        ({"max_lead": 0}, "max_lead=0"),
        ({"max_live_bytes": 0}, "max_live_bytes=0"),
        ({"max_live_bytes": -5}, "max_live_bytes=-5"),
        ({"max_live_bytes": "5G"}, "max_live_bytes is '5G', a str; give an integer"),
        ({"max_lead": True}, "max_lead is True, a bool; give an integer"), ({"max_delay": -1}, "max_delay=-1"),
        ({"give_up_after": -1}, "give_up_after=-1"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AsyncProducer("file:///nowhere", **{"producer_id": "p", **options})


@pytest.mark.parametrize(
    ("batch", "message"), [
        ([b"x"], "1 payloads for a lake of 2 slices"),
        ([b"x"] * 3, "3 payloads for a lake of 2 slices"), (b"xx", "not a bytes"), ("xx", "not a str"),
        (iter([b"x", b"x"]), "sequence"), ([b"x", "x"], "payload 1 is a str"), ([b"x", [1]], "payload 1 is a list"),
        ([b"x", np.array([None])], "payload 1 is a ndarray"),
        ([b"x" * 500, b"x" * 501], "1001 bytes exceeds max_pending_bytes=1000"),
    ],
)  # fmt: skip
@scenario(simulate)
async def test_a_bad_batch_is_refused_and_changes_nothing(world: World, batch: Any, message: str) -> None:
    async with world.producer("p", max_pending_bytes=1000) as producer:
        with pytest.raises(UsageError, match=message):
            await producer.append(batch, position=1)
        assert producer.next_seq == 0
        await feed(producer, 1)
    world.check(p=1)


@pytest.mark.parametrize(
    ("position", "message"), [
        (b"x" * POSITION_BYTES_MAX, f"takes {POSITION_BYTES_MAX + 5} bytes as msgpack, at most {POSITION_BYTES_MAX}"),
        (object(), "msgpack"), (datetime.now(UTC), "msgpack"), (2**70, "msgpack"), ("\ud800", "msgpack"),
        ({"a": {1, 2}}, "msgpack"),
    ],
)  # fmt: skip
@scenario(simulate)
async def test_a_bad_position_is_refused(world: World, position: object, message: str) -> None:
    async with world.producer("p") as producer:
        with pytest.raises(UsageError, match=message):
            await producer.append(BATCH, position=position)
        assert producer.next_seq == 0


@pytest.mark.parametrize("position", [None, 0, "é", b"\0", 1.5, [1, [2]], {"a": {"b": 1}, 3: None}, 2**63])
@scenario(simulate)
async def test_any_msgpack_value_is_a_position(world: World, position: object) -> None:
    world.shared.watch = None  # this source's positions are not the ledger's
    async with world.producer("p") as producer:
        assert producer.position is None
        await producer.append(BATCH, position=position)
        await producer.flush()
        assert producer.position == position
    async with world.producer("p") as producer:
        assert producer.position == position


@pytest.mark.parametrize("records", [(1,), (1, 2, 3), (1, -1), (1, True), (1, 1.5), (1, 2**32)])
@scenario(simulate)
async def test_bad_record_counts(world: World, records: Any) -> None:
    async with world.producer("p") as producer:
        with pytest.raises(UsageError, match="record counts"):
            await producer.append(BATCH, position=0, records=records)


@scenario(simulate)
async def test_record_counts_reach_the_log(world: World) -> None:
    world.shared.watch = None
    async with world.producer("p") as producer:
        await producer.append(BATCH, position=0, records=(3, 4))
        await producer.append(BATCH, position=1)
    reader = await LogReader.open(world.store("r"), world.identity)
    assert reader.state.total_records == 7 + SLICES
    assert (await reader.entry(Step(0))).tgb.slice(SliceIndex(1)).records == 4


@pytest.mark.parametrize(
    "make", [
        bytes, bytearray, memoryview,
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: memoryview(data + data)[::2],
    ],
)  # fmt: skip
@scenario(simulate)
async def test_any_buffer_is_a_payload(world: World, make: Callable[[bytes], Any]) -> None:
    world.shared.watch = None
    data = payload("p", 0, 0)
    async with world.producer("p") as producer:
        await producer.append([make(data), b""], position=0)
    store = world.store("r")
    entry = await (await LogReader.open(store, world.identity)).entry(Step(0))
    ref = entry.tgb.slice(SliceIndex(0))
    stored = await store.get(entry.tgb.key)
    assert stored is not None
    assert stored[ref.offset : ref.offset + ref.length] == bytes(make(data))
    assert entry.tgb.length(SliceIndex(1)) == 0


def npy(value: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(value))
    return file.getvalue()


@pytest.mark.parametrize(
    "payload", [
        np.arange(3), np.zeros((2, 2), np.uint8), np.array(7, np.uint8), np.array([True]),
        array.array("d", [1.0]), memoryview(b"four").cast("B", (2, 2)), memoryview(b"four").cast("I"),
        io.BytesIO(b"x"), "text", None,
    ],
)  # fmt: skip
@scenario(simulate)
async def test_what_is_not_plain_bytes_is_a_type_error_that_says_what_to_pass(world: World, payload: Any):
    async with world.producer("p") as producer:
        with pytest.raises(TypeError, match=r"payload 1 .*getvalue\(\).*stepfs\.torch\.dump") as raised:
            await producer.append([b"x", payload], position=1)
        assert isinstance(raised.value, UsageError)  # what callers caught before
        assert producer.next_seq == 0


@pytest.mark.parametrize(
    "payload", [
        b"x", bytearray(b"x"), memoryview(b"axa")[::2], io.BytesIO(b"x").getbuffer(), mmap.mmap(-1, 16),
        np.frombuffer(b"x", np.uint8), memoryview(b"x").cast("c"), memoryview(b"x").cast("b"),
        (ctypes.c_char * 3)(), (ctypes.c_ubyte * 3)(),
    ],
)  # fmt: skip
@scenario(simulate)
async def test_every_one_dimensional_buffer_of_bytes_is_a_payload(world: World, payload: Any) -> None:
    world.shared.watch = None
    async with world.producer("p") as producer:
        await producer.append([payload, b"x"], position=1)
        await producer.flush()


def test_a_lake_that_promises_its_kind_of_file_looks_at_the_first_batch_of_each_incarnation() -> None:
    async def scenario() -> None:
        store = FaultyStore()
        await create_lake(store, slices=SLICES, ext=".npy", check_payload=True)
        good = [npy(slice_) for slice_ in range(SLICES)]
        for position in range(2):
            async with AsyncProducer("", producer_id="p", store=store) as producer:
                with pytest.raises(UsageError, match=r"payload 1 is no \.npy file.*begins with b'raw'"):
                    await producer.append([good[0], b"raw"], position=9)
                assert producer.next_seq == position
                await producer.append(good, position=position)
        async with AsyncProducer("", producer_id="p", store=store) as producer:
            await producer.append(good, position=2)
            await producer.append([b"not looked at"] * SLICES, position=3)

    trio.run(scenario)


def test_without_the_promise_bytes_are_bytes() -> None:
    async def scenario() -> None:
        store = FaultyStore()
        await create_lake(store, slices=SLICES, ext=".npy")
        async with AsyncProducer("", producer_id="p", store=store) as producer:
            await producer.append([b"raw"] * SLICES, position=0)

    trio.run(scenario)
