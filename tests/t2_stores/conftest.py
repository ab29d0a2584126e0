"""The stores under contract: one fixture, every implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs.testing.faulty_store import FaultyStore, ObjectMap

LANES = 10


@pytest.fixture(params=["file", "memory", "s3"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[list[Store]]:
    """Several processes' views of one empty store."""
    opened: list[Store]
    if request.param == "memory":
        shared = ObjectMap()
        opened = [
            FaultyStore(shared, actor=f"lane {lane}", latency=lambda _verb, _size, _rng: 0.0)
            for lane in range(LANES)
        ]
    else:
        url = request.getfixturevalue(f"{request.param}_url")
        opened = [open_store(url) for _ in range(LANES)]
    try:
        yield opened
    finally:
        with trio.CancelScope(shield=True):
            for one in opened:
                await one.aclose()


@pytest.fixture
def store(stores: list[Store]) -> Store:
    """An empty store."""
    return stores[0]
