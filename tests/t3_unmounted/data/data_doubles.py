"""A store in memory whose GETs can be held, slowed or spoilt one by one, and steps made of random slices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence

import trio

from stepfs.data.slices import SliceHandle
from stepfs.errors import AbsentError
from stepfs.format.ids import Epoch, SliceIndex, Step, Version
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import Descriptor, build
from stepfs.store.api import Buffer, Counts, Entry, Progress, Put, ignore_progress

LAKE_ID = "0" * 32


_ONLY_RANGES = "the data path asks a store for ranges of objects and for nothing else"


class HeldStore:
    """`behave(request number, offset, size)` may return seconds to wait, or raise; `spoil` edits the bytes."""

    def __init__(self) -> None:
        self.url = "memory://held"
        self.counts = Counts()
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, int, int]] = []
        self.running = 0
        self.running_max = 0
        self.behave: Callable[[int, int, int], float] = lambda number, offset, size: 0.0
        self.spoil: Callable[[int, memoryview], None] = lambda number, buffer: None
        self.gates: dict[int, trio.Event] = {}  # offset → the GET waits for it

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, landed: Progress = ignore_progress
    ) -> int | None:
        number = len(self.requests)
        self.requests.append((key, offset, len(buffer)))
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await trio.sleep(self.behave(number, offset, len(buffer)))
            if offset in self.gates:
                await self.gates[offset].wait()
        finally:
            self.running -= 1
        data = self.objects.get(key)
        if data is None:
            return None
        part = memoryview(data)[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self.spoil(number, buffer)
        landed(len(part))
        return len(part)

    async def get(self, key: str, *, bytes_max: int = 256 << 20) -> bytes | None:
        raise AssertionError(_ONLY_RANGES)

    async def create(self, key: str, body: bytes) -> Put:
        raise AssertionError(_ONLY_RANGES)

    async def put(self, key: str, parts: Sequence[Buffer], *, crc32c: int | None = None) -> None:
        raise AssertionError(_ONLY_RANGES)

    async def list(self, prefix: str, *, after: str = "", limit: int | None = None, ages: bool = False) -> list[Entry]:
        raise AssertionError(_ONLY_RANGES)

    async def delete(self, keys: Iterable[str]) -> None:
        raise AssertionError(_ONLY_RANGES)

    async def aclose(self) -> None:
        return None


class World:
    """A store with committed steps; also the tree and the log that a prefetcher follows."""

    lone_entries_max = 1000

    def __init__(self, seed: int = 1) -> None:
        self.store = HeldStore()
        self.entries: list[StepEntry] = []
        self.payloads: list[list[bytes]] = []
        self._random = random.Random(seed)

    def first_visible(self) -> Step:
        return Step(0)

    def last_visible(self) -> Step:
        return Step(len(self.entries) - 1)

    def entry_if_loaded(self, step: Step) -> StepEntry | None:
        return self.entries[step] if 0 <= step < len(self.entries) else None

    async def entry(self, step: Step) -> StepEntry:
        raise AbsentError(f"step {step}")

    async def lone_entry(self, step: Step) -> StepEntry:
        return await self.entry(step)

    def add_step(self, sizes: Sequence[int]) -> StepEntry:
        step = Step(len(self.entries))
        payloads = [self._random.randbytes(min(size, 4096)) for size in sizes]
        payloads = [(p * (-(-size // len(p)) if p else 0))[:size] for p, size in zip(payloads, sizes, strict=True)]
        image = build(
            lake_id=LAKE_ID, producer_id="p", epoch=Epoch(1), seq=step, payloads=payloads, records=[1] * len(sizes),
        )  # fmt: skip
        key = f"{LAKE_ID}/data/{step}.tgb"
        self.store.objects[key] = b"".join(image.parts)
        descriptor = Descriptor(0, key, image.size, step, image.packed_slices, image.packed_blocks)
        entry = StepEntry(step, Version(step), 1_700_000_000_000 + step, "p", Epoch(1), descriptor)
        self.entries.append(entry)
        self.payloads.append(payloads)
        return entry


def indices(*numbers: int) -> list[SliceIndex]:
    return [SliceIndex(number) for number in numbers]


def processor() -> Callable[[], float]:
    """A clock of the processor's time by which each plan costs two milliseconds."""
    return itertools.count(0.0, 0.002).__next__


def world_of(steps: int, *sizes: int) -> World:
    """Steps of slices of these sizes."""
    world = World()
    for _ in range(steps):
        world.add_step(sizes)
    return world


def world_with(sizes: Sequence[int]) -> tuple[World, StepEntry]:
    """One step of slices of these sizes, and its entry."""
    world = World()
    return world, world.add_step(sizes)


async def read_all(handle: SliceHandle, piece: int = 1 << 20) -> bytes:
    data = b""
    while part := await handle.read(len(data), piece):
        data += part
    return data
