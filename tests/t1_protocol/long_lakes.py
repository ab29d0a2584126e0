"""Long histories, as `scripts/make_long_lake` makes them, on a store in memory; and runs in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from deterministic import run_seeded
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock

from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SEGMENT_STEPS
from stepfs.format.keys import log_prefix
from stepfs.lake.identity import create_lake, open_lake
from stepfs_producer import AsyncProducer

SLICES = 4


MANY = 20_000  # as many as other tests of this folder have: a process makes that lake once


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

    def versions(self) -> int:
        """How many the log has had."""
        prefix = log_prefix(self.identity.lake_id)
        return 1 + max(int(key.removeprefix(prefix)) for key in self.shared.objects if key.startswith(prefix))

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
