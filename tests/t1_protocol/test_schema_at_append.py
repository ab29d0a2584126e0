"""A lake with a payload schema: every append is held against it, and it costs no request anywhere."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
import trio
import trio.testing
from doubles.faulty_store import FaultyStore, ObjectMap
from producer_world import simulate

from stepfs.errors import NewerFormatError, UsageError
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer

SCHEMA = '{"version":1,"format":"bin","arrays":{"ids":{"dtype":"uint16","shape":["rows",4]}}}'
SLICES = 12  # more than are checked without a thread


def rows(count: int) -> bytes:
    return np.zeros((count, 4), np.uint16).tobytes()


async def lake(schema: str | None, slices: int = SLICES) -> ObjectMap:
    shared = ObjectMap()
    store = FaultyStore(shared, actor="init")
    await create_lake(store, slices=slices, ext=".bin", payload_schema=schema)
    return shared


def producer(shared: ObjectMap, who: str = "p") -> AsyncProducer:
    store = FaultyStore(shared, actor=who)
    store.counts.keys = []
    return AsyncProducer("memory://", producer_id=who, store=store)


@pytest.mark.parametrize("slices", [2, SLICES])
def test_an_append_at_odds_uploads_nothing_and_the_producer_goes_on(slices: int) -> None:
    async def scenario(_world: object) -> None:
        shared = await lake(SCHEMA, slices)
        good = [rows(3)] * slices
        async with producer(shared) as writer:
            await writer.append(good, position=1)
            await writer.flush()
            before = set(shared.objects)
            with pytest.raises(
                UsageError,
                match=r"payload 1 has 7 bytes, the lake's schema says 'ids' is uint16 \[rows, 4\]; append what",
            ):
                await writer.append([rows(1), b"7 bytes", *good[2:]], position=2)
            with trio.move_on_after(60):
                await trio.sleep_forever()
            assert set(shared.objects) == before
            assert writer.next_seq == 1
            assert await writer.append(good, position=2) == 1
        assert await steps(shared) == 2

    simulate(scenario)


async def steps(shared: ObjectMap) -> int:
    store = FaultyStore(shared, actor="reader")
    return (await LogReader.open(store, await open_lake(store))).state.next_step


def test_a_schema_costs_no_request_at_the_start_nor_for_a_commit() -> None:
    async def scenario(_world: object) -> None:
        costs = []
        for schema in (None, SCHEMA):
            shared = await lake(schema)
            async with producer(shared) as writer:
                for number in range(5):
                    await writer.append([rows(number)] * SLICES, position=number)
                    await writer.flush()
                store = writer.running.writer._store
                costs.append(Counter(verb for verb, _ in store.counts.keys or []))
        assert costs[0] == costs[1]

    simulate(scenario)


def test_appends_of_several_tasks_keep_the_order_of_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of many payloads takes a thread: a later append must not overtake it, or positions would go back."""
    all_called = threading.Event()

    def first_waits(payloads: list[bytes], **_options: object) -> None:
        if len(payloads[0]) == len(rows(1)):
            assert all_called.wait(60)

    monkeypatch.setattr("stepfs_producer.producer.check_schema", first_waits)

    async def scenario() -> None:
        shared = await lake(SCHEMA)
        seqs: dict[int, int] = {}

        async def append(writer: AsyncProducer, number: int) -> None:
            seqs[number] = await writer.append([rows(1 + number)] * SLICES, position=number)

        async with producer(shared) as writer, trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(append, writer, number)
                await trio.testing.wait_all_tasks_blocked()
            all_called.set()
        assert seqs == {number: number for number in range(4)}

    trio.run(scenario)


@pytest.mark.parametrize("schema", ['{"version":2,"sections":[]}', '{"version":2,"format":"bin"}'])
def test_a_schema_of_a_newer_stepfs_is_refused_before_anybody_is_fenced(schema: str) -> None:
    async def scenario(_world: object) -> None:
        shared = await lake(SCHEMA)
        async with producer(shared) as healthy:
            await healthy.append([rows(1)] * SLICES, position=1)
            await healthy.flush()
            identity = await open_lake(healthy.running.writer._store)
            newer = await lake(schema)
            with pytest.raises(NewerFormatError, match="upgrade stepfs"):
                async with producer(newer, "other"):
                    pass
            assert [key for key in newer.objects if "/log/" in key] == []
            assert identity.payload_schema == SCHEMA
        assert await steps(newer) == 0, "readers mount it all the same"

    simulate(scenario)
