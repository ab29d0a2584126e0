"""Values that a producer refuses, with numbers in the message, and those that it takes.

Arguments, batches, positions, record counts.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from ledger import payload
from producer_world import SLICES, World, feed, simulate
from scenarios import scenario

from stepfs.errors import UsageError
from stepfs.format.ids import POSITION_BYTES_MAX, SliceIndex, Step
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer

BATCH = [b"x"] * SLICES


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
