"""What counts as a payload: bytes, never an array whose buffer no reader could open; and what a lake may promise."""

from __future__ import annotations

import array
import ctypes
import io
import mmap
from typing import Any

import numpy as np
import pytest
import trio
from doubles.faulty_store import FaultyStore
from producer_world import SLICES, World, simulate
from scenarios import scenario

from stepfs.errors import UsageError
from stepfs.lake.identity import create_lake
from stepfs_producer import AsyncProducer


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
