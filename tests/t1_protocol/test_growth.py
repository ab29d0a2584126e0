"""Growth: what a commit and an opening cost does not depend on how much history there is. Exact, by count.

The long histories are those that `scripts/make_long_lake` makes, on a store in memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest
from deterministic import run_seeded
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock

from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.format.records import LakeIdentity
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer

SLICES = 4
_LONG: dict[int, dict[str, bytes]] = {}  # by steps: the objects of a lake that takes seconds to make
T = TypeVar("T")


def generator() -> ModuleType:
    """`scripts/make_long_lake` as a module; it has no suffix because a person runs it."""
    path = Path(__file__).parents[2] / "scripts" / "make_long_lake"
    loader = SourceFileLoader("make_long_lake", str(path))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@dataclass
class Lake:
    """A lake in memory and a producer's way to write to it."""

    shared: ObjectMap
    identity: LakeIdentity

    def store(self, actor: str) -> FaultyStore:
        """Equal latencies: uploads begun together end together, and one commit takes them all."""
        return FaultyStore(self.shared, actor=actor, latency=lambda _verb, _size, _rng: 0.01)

    def producer(self, store: FaultyStore) -> AsyncProducer:
        return AsyncProducer("memory://", producer_id="measured", store=store, clock=TrioClock(), uploads=1000)


async def lake_of(steps: int) -> Lake:
    """A lake of `steps` committed steps, one commit each."""
    if steps <= SEGMENT_STEPS:
        shared = ObjectMap()
        identity = await create_lake(FaultyStore(shared), slices=SLICES, clock=TrioClock())
        lake = Lake(shared, identity)
        async with AsyncProducer(
            "memory://", producer_id="generator", store=lake.store("generator"), clock=TrioClock()
        ) as producer:
            for _ in range(steps):
                await append(producer)
                await producer.flush()
        return lake
    if steps not in _LONG:
        made = ObjectMap()
        module = generator()
        module.open_store = lambda url, endpoint_url: FaultyStore(made)  # type: ignore[attr-defined]
        await module.make("memory://", None, steps, SLICES, 64)
        _LONG[steps] = made.objects
    shared = ObjectMap(objects=dict(_LONG[steps]), _keys=sorted(_LONG[steps]))
    return Lake(shared, await open_lake(FaultyStore(shared)))


async def append(producer: AsyncProducer) -> None:
    await producer.append([b"x" * 64] * SLICES, position=None)


def virtually(scenario: Callable[[], Awaitable[T]]) -> T:
    return run_seeded(scenario, seed=0)


@dataclass(frozen=True)
class Cost:
    commits: int
    requests: tuple[str, ...]  # verb and room, of everything but uploads, in order
    bytes_written: int  # uploads too: they are the same
    bytes_read: int


async def cost(steps: int, tgbs: int, repeats: int = 1) -> Cost:
    """What `repeats` commits of `tgbs` TGBs each cost a producer that has already committed once."""
    lake = await lake_of(steps)
    store = lake.store("measured")
    async with lake.producer(store) as producer:
        await append(producer)
        await producer.flush()
        before, counts = producer.tally.commits, store.counts
        written, read = counts.bytes_written, counts.bytes_read
        counts.keys = []
        for _ in range(repeats):
            for _ in range(tgbs):
                await append(producer)
            await producer.flush()
        rooms = [(verb, key.removeprefix(lake.identity.lake_id + "/").split("/")[0]) for verb, key in counts.keys]
        return Cost(
            commits=producer.tally.commits - before,
            requests=tuple(f"{verb} {room}" for verb, room in rooms if room != "data"),
            bytes_written=counts.bytes_written - written,
            bytes_read=counts.bytes_read - read,
        )


@pytest.mark.parametrize("tgbs", [1, 16])
def test_a_commit_after_1e5_steps_costs_what_it_costs_after_1e2(tgbs: int) -> None:
    short = virtually(partial(cost, 100, tgbs, 20))
    long = virtually(partial(cost, 100_000, tgbs, 20))
    once = ("get log", "create log", "get control")
    assert short.commits == long.commits == 20
    assert short.requests == long.requests == once * 20
    assert long.bytes_written <= 1.05 * short.bytes_written
    assert long.bytes_read == short.bytes_read == 0


def test_snapshots_and_segments_included_growth_stays_below_5_percent() -> None:
    """Over a whole snapshot period, everything the producer sends: a snapshot's references grow, 1/512 per commit."""
    period = 2 * SEGMENT_STEPS
    short = virtually(partial(cost, 100, 1, period))
    long = virtually(partial(cost, 100_000, 1, period))
    assert "create index" in short.requests
    assert len(long.requests) <= 1.01 * len(short.requests)
    moved = [found.bytes_written + found.bytes_read for found in (short, long)]
    assert moved[1] <= 1.05 * moved[0]


async def opened(steps: int) -> tuple[int, int]:
    """Requests of opening a lake cold, and of then reading one old entry."""
    lake = await lake_of(steps)
    store = lake.store("reader")
    reader = await LogReader.open(store, await open_lake(store))
    assert reader.state.next_step == steps
    requests = store.counts.requests
    await reader.entry(Step(7))
    return requests, store.counts.requests - requests


@pytest.mark.parametrize("tail", [pytest.param(1, marks=pytest.mark.slow), 300])
def test_a_cold_reader_needs_as_many_requests_for_1e5_steps_as_for_1e3(tail: int) -> None:
    """The tail of a lake is at most a segment long and decides alone; an old entry takes one more request."""
    short, long = (
        virtually(partial(opened, segments * SEGMENT_STEPS + tail)) for segments in (2, 100_000 // SEGMENT_STEPS)
    )
    assert short == long
    assert long == (9 + tail, 1)
