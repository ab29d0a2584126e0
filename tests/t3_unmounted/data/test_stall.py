"""A trainer whose pace is 95 % of the store's bandwidth, in virtual time: after its first steps it waits for nothing.

The store is a link: GETs share its bandwidth in turns, each after 20 ms. So a lead is won by 5 % of a step per step, and
whatever order of GETs lets the link idle, or hides the nearest step behind later ones, shows as a wait.
"""

from __future__ import annotations

import pytest
import trio
from data_doubles import LAKE_ID, HeldStore, World, processor

from stepfs.data.prefetch import Prefetcher
from stepfs.data.slices import Slices
from stepfs.format.ids import Epoch, SliceIndex, Step, Version
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import Descriptor, build
from stepfs.store.api import Progress, ignore_progress

MIB = 1 << 20
TURN_BYTES = 256 << 10
LATENCY_S = 0.02
SHARE = 0.95
BEGINNING = 10
STEPS = 60


class Link(HeldStore):
    """A store at the end of a link of so many bytes per second."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, landed: Progress = ignore_progress
    ) -> int | None:
        self.requests.append((key, offset, len(buffer)))
        await trio.sleep(LATENCY_S)
        for at in range(0, len(buffer), TURN_BYTES):
            size = min(TURN_BYTES, len(buffer) - at)
            self._free_at = max(trio.current_time(), self._free_at) + size / self.bytes_per_s
            await trio.sleep_until(self._free_at)
            buffer[at : at + size] = self.objects[key][offset + at : offset + at + size]
            landed(size)
        return len(buffer)


def lake(store: HeldStore, sizes: list[int]) -> World:
    """Steps of one and the same bytes: hundreds of them cost no more memory than one."""
    world = World()
    world.store = store
    payloads = [bytes(size) for size in sizes]
    image = build(
        lake_id=LAKE_ID, producer_id="p", epoch=Epoch(1), seq=0, payloads=payloads, records=[1] * len(sizes),
    )  # fmt: skip
    data = b"".join(image.parts)
    for step in range(STEPS):
        key = f"{LAKE_ID}/data/{step}.tgb"
        store.objects[key] = data
        descriptor = Descriptor(0, key, image.size, step, image.packed_slices, image.packed_blocks)
        world.entries.append(StepEntry(Step(step), Version(step), step, "p", Epoch(1), descriptor))
    return world


async def waits_of(bytes_per_s: float, sizes: list[int], *, memory_bytes: int) -> tuple[list[float], int]:
    """What a trainer waits for each step, and the bytes that were fetched."""
    world = lake(Link(bytes_per_s), sizes)
    slices = Slices(world.store, memory_bytes=memory_bytes)
    prefetcher = Prefetcher(slices, world, world, processor_s=processor())

    async def read(step: Step, index: SliceIndex) -> None:
        handle = slices.open(world.entries[step], index)
        prefetcher.note_open(step, index)
        size = 0
        while part := await handle.read(size, MIB):
            size += len(part)
        handle.close()

    waits = []
    async with trio.open_nursery() as nursery:
        await nursery.start(slices.run)
        await nursery.start(prefetcher.run)
        for step in range(STEPS):
            began = trio.current_time()
            async with trio.open_nursery() as ranks:
                for index in range(len(sizes)):
                    ranks.start_soon(read, Step(step), SliceIndex(index))
            waits.append(trio.current_time() - began)
            await trio.sleep(sum(sizes) / (SHARE * bytes_per_s))
        nursery.cancel_scope.cancel()
    return waits, slices.counts.bytes_fetched


@pytest.mark.parametrize(
    ("bytes_per_s", "sizes", "memory_bytes"), [
        (100e6, [4 * MIB], 512 * MIB), (50e6, [4 * MIB], 128 * MIB),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (
                (50e6, [4 * MIB], 512 * MIB), (100e6, [MIB // 2] * 8, 512 * MIB), (100e6, [10 * MIB], 512 * MIB),
            )
        ),
    ], ids=["100 MB/s", "little memory", "50 MB/s", "eight ranks", "files of two GETs"],
)  # fmt: skip
async def test_near_the_bandwidth_only_the_first_steps_wait(autojump_clock, bytes_per_s, sizes, memory_bytes):
    del autojump_clock
    waits, fetched = await waits_of(bytes_per_s, sizes, memory_bytes=memory_bytes)
    assert sum(waits[BEGINNING:]) == pytest.approx(0.0, abs=1e-3)
    assert fetched <= 1.02 * STEPS * sum(sizes)
    one_s = LATENCY_S + sum(sizes) / bytes_per_s
    assert sum(waits[:BEGINNING]) < 9 * one_s, "what was fetched ahead stood in the way of the first steps"


async def test_a_reader_that_is_not_ahead_copies_what_has_landed_while_the_rest_lands(autojump_clock):
    """A cold file of eight blocks on a link that is full with one GET. Fetched all at once, its first block came with the
    last one, and link and reader took turns: the sum of both times.
    """
    del autojump_clock
    link, reader, size = 550e6, 780e6, 64 * MIB
    world = lake(Link(link), [size])
    slices = Slices(world.store, memory_bytes=256 * MIB)
    async with trio.open_nursery() as nursery:
        await nursery.start(slices.run)
        for step in range(2):
            began = trio.current_time()
            handle = slices.open(world.entries[step], SliceIndex(0))
            for offset in range(0, size, MIB):
                await handle.read(offset, MIB)
                await trio.sleep(MIB / reader)
            handle.close()
            assert trio.current_time() - began < 0.9 * (LATENCY_S + size / link + size / reader)
        nursery.cancel_scope.cancel()
    assert slices.counts.requests == 2 * 8
