"""A lake in memory and in virtual time, and readers of it; a lake on disk for tests with real threads and processes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
from doubles.faults import no_faults
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim

from stepfs._internal.clock import SystemClock
from stepfs.format.grid import Grid
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.reader.assembly import open_reader
from stepfs.reader.options import LakeOptions
from stepfs.store.opening import open_store
from stepfs_producer import AsyncProducer, Producer

SMALL = 1000


def payload(step: int, index: int, size: int) -> bytes:
    return (b"%d/%d;" % (step, index) * (size // 4 + 1))[:size]


@dataclass
class Shelf:
    shared: ObjectMap
    identity: LakeIdentity
    sizes: list[list[int]] = field(default_factory=list)

    @classmethod
    async def create(cls, *, slices: int = 2) -> Shelf:
        shared = ObjectMap()
        store = FaultyStore(shared, actor="init")
        return cls(shared, await create_lake(store, slices=slices, ext=".bin", clock=TrioClock()))

    @classmethod
    async def of(cls, *sizes: int, slices: int = 2) -> Shelf:
        """With one step for each size."""
        shelf = await cls.create(slices=slices)
        await shelf.commit(*sizes)
        return shelf

    async def commit(self, *sizes: int) -> None:
        """One step for each size, its second slice and the following a byte longer each."""
        store = FaultyStore(self.shared, actor="tok-0")
        async with AsyncProducer("memory://", producer_id="tok-0", store=store, clock=TrioClock()) as producer:
            for size in sizes:
                lengths = [size + index for index in range(self.identity.slices)]
                step = len(self.sizes)
                self.sizes.append(lengths)
                batch = [payload(step, index, length) for index, length in enumerate(lengths)]
                await producer.append(batch, position=step)

    def expected(self, step: int, index: int) -> bytes:
        return payload(step, index, self.sizes[step][index])

    async def log(self) -> LogReader:
        return await LogReader.open(FaultyStore(self.shared, actor="operator"), self.identity)

    async def seal(self) -> None:
        await seal(await self.log(), TrioClock())

    async def checkpoint(self, group: str, step: int, *, keep: int = 1) -> None:
        store = FaultyStore(self.shared, actor="trainer")
        await Group.of(store, self.identity, group, TrioClock()).add(Step(step), keep=keep)

    async def reclaim(self) -> None:
        await reclaim(FaultyStore(self.shared, actor="reclaimer"), self.identity, clock=TrioClock())

    def data_key(self, step: int) -> str:
        """The object of a step; steps are appended one by one, and keys end with their number."""
        found = [key for key in self.shared.objects if key.endswith(".tgb")]
        return sorted(found, key=lambda key: int(key.rpartition("/")[2].split("-")[1]))[step]

    @asynccontextmanager
    async def reader(self, *, memory_bytes: int = 64 << 20, plan=no_faults, store=None, **options):
        """A `ReaderParts` that runs."""
        store = store or FaultyStore(self.shared, actor="reader", plan=plan)
        words = LakeOptions("memory://lake", **options)
        async with open_reader(
            words, open_store=lambda _options, _silence: store, memory_bytes=memory_bytes
        ) as assembly:
            yield assembly

    async def read(self, assembly, step: int, index: int, **options) -> bytes:
        return bytes(await assembly.read(Step(step), SliceIndex(index), **options))


async def outcome_of(function, *args, **options):
    """The result, or the exception."""
    try:
        return await function(*args, **options)
    except Exception as error:  # noqa: BLE001
        return error


def lake_on_disk(url: str, *, slices: Grid | int = 2, ext: str = ".bin") -> None:
    async def create() -> None:
        store = open_store(url)
        await create_lake(store, slices=slices, ext=ext)
        await store.aclose()

    trio.run(create)


def commit_on_disk(url: str, steps: range, size: int = SMALL, *, slices: int = 2) -> None:
    with Producer(url, producer_id="tok-0") as producer:
        for step in steps:
            producer.append([payload(step, index, size) for index in range(slices)], position=step)


def seal_on_disk(url: str) -> None:
    async def run() -> None:
        store = open_store(url)
        await seal(await LogReader.open(store, await open_lake(store)), SystemClock())
        await store.aclose()

    trio.run(run)


def lake_of(directory: Path, steps: int, size: int = SMALL) -> str:
    """The URL of a new lake below `directory` with so many steps of two slices."""
    url = (directory / "lake").as_uri()
    lake_on_disk(url)
    commit_on_disk(url, range(steps), size)
    return url
