"""Hazard 4: a store that ignores `If-None-Match`. Every guarantee rests on it, so such a store is refused before use."""

from __future__ import annotations

import pytest
import trio
from doubles.faults import FALSE_412, Scripted
from process_store import ProcessStore
from producer_world import World, feed
from small_world import grow, small

from stepfs.errors import RefusedError
from stepfs.format.keys import LAKE
from stepfs.lake.identity import create_lake
from stepfs.store.api import Put, Store


class LyingStore(ProcessStore):
    """Answers every create with success and overwrites, as `rclone serve s3` does (hazard 4)."""

    async def create(self, key: str, body: bytes) -> Put:
        self.shared.remove(key)
        return await super().create(key, body)


async def hazard_04(world: World) -> None:
    """Two producers on a store that ignores conditions: neither may start."""
    async with trio.open_nursery() as nursery:
        for who in ("x", "y"):
            nursery.start_soon(_produce, world, who)
    world.check(**world.ledger.published)


async def _produce(world: World, who: str) -> None:
    with pytest.raises(RefusedError, match="honours conditional"):
        async with world.producer(who, LyingStore(world.shared, actor=who)) as producer:
            await feed(producer, 5)


def test_hazard_04_a_store_that_ignores_conditions_is_refused() -> None:
    small(hazard_04, on=grow)

    async def no_lake(world: World) -> None:
        world.shared.remove(LAKE)
        with pytest.raises(RefusedError, match="honours conditional"):
            await create_lake(LyingStore(world.shared, actor="liar"), slices=1)

    small(no_lake, on=grow)


def test_mutant_04_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def believe(store: Store, *, thorough: bool) -> None:
        """Never probe."""

    monkeypatch.setattr("stepfs_producer.commit.loop.probe_store", believe)
    with pytest.raises(BaseExceptionGroup) as found:
        small(hazard_04, on=grow)
    assert found.group_contains(pytest.fail.Exception) or found.group_contains(AssertionError)


def test_a_lake_that_a_false_412_refused_is_said_to_be_tried_again() -> None:
    """Seed 3001189: it was called another process's, and the simulated fork took that for an answer."""

    async def refused(world: World) -> None:
        world.shared.remove(LAKE)
        store = ProcessStore(world.shared, actor="founder", plan=Scripted([("create", LAKE, FALSE_412)]))
        with pytest.raises(RefusedError, match="or the store erred; try again"):
            await create_lake(store, slices=1)
        await create_lake(store, slices=1)

    small(refused, on=grow)
