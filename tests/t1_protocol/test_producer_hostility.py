"""Producers on a store that fails in every way, and through outages: records are in the log exactly once, and an
outage is a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
import trio
from deterministic import scaled
from doubles.faults import (
    CONFLICT_409,
    ERROR_500,
    ERROR_500_APPLIED,
    LOST_REQUEST,
    LOST_RESPONSE,
    OWN_412,
    RESET_AFTER,
    RESET_BEFORE,
    THROTTLED_503,
    Weighted,
    delayed,
)
from producer_world import World, append, feed, simulate
from scenarios import scenario

from stepfs.errors import StoreUnreachableError
from stepfs.store.api import Buffer
from stepfs_producer.backoff import Backoff, Outage

HOSTILE = {
    LOST_REQUEST: 0.02, LOST_RESPONSE: 0.03, RESET_BEFORE: 0.03, RESET_AFTER: 0.05, ERROR_500: 0.02,
    ERROR_500_APPLIED: 0.02, THROTTLED_503: 0.02, CONFLICT_409: 0.05, OWN_412: 0.05, delayed(3.0): 0.02,
    delayed(20.0, wait_s=15.0): 0.01,
}  # fmt: skip


FAR = "trying on for|not written|raise max_delay"


@pytest.mark.logs(FAR)
@pytest.mark.parametrize("seed", range(25))
def test_many_producers_on_a_hostile_store(seed: int) -> None:
    """Six producers, each killed and restarted at random, faults on every kind of request, boundaries crossed often."""
    per_producer, lives = 12, 4

    async def scenario(world: World) -> None:
        world.ledger.segment_steps = 8

        async def life(who: str, number: int, *, killed: bool) -> None:
            plan = Weighted(HOSTILE)
            plan.active = killed
            store = world.store(who, plan, seed=seed * 100 + number)
            with trio.CancelScope() as scope:
                store.kill = scope.cancel
                store.kill_at = 5 + store._rng.randrange(60) if killed else None
                async with world.producer(who, store, max_delay=1.0) as producer:
                    await feed(producer, per_producer, pause_s=0.05)

        async def life_after_life(who: str) -> None:
            for number in range(lives):
                with suppress(StoreUnreachableError):
                    await life(who, number, killed=True)
            await life(who, lives, killed=False)

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(life_after_life, f"p{number}")
        await world.settle()
        world.check(**{f"p{number}": per_producer for number in range(6)})

    with scaled(SEGMENT_STEPS=8):
        simulate(scenario, seed=seed)


@pytest.mark.logs(FAR)
@scenario(simulate)
async def test_an_outage_is_borne_and_a_longer_one_ends_the_producer(world: World) -> None:
    store = world.store("p")
    down = Weighted({RESET_BEFORE: 1.0})
    down.active = False
    store.plan = down
    with pytest.raises(StoreUnreachableError, match="no answer"):
        async with world.producer("p", store, give_up_after=300.0) as producer:
            await feed(producer, 1)
            await producer.flush()
            down.active = True
            await append(producer, 1)
            await trio.sleep(200.0)
            down.active = False
            await producer.flush()
            await trio.sleep(200.0)
            down.active = True
            await append(producer, 2)
            await producer.flush()
    async with world.producer("p") as producer:
        assert producer.position == 2
    world.check(p=2)


@pytest.mark.logs("trying on for")
@scenario(simulate)
async def test_an_outage_that_meets_fifty_uploads_is_told_once(world: World, caplog):
    store = world.store("p")
    put, until_s = store.put, trio.current_time() + 60.0

    async def put_when_there_is_room(key: str, parts: Sequence[Buffer], *, crc32c: int | None) -> None:
        if trio.current_time() < until_s:
            raise StoreUnreachableError("no space left on device")
        await put(key, parts, crc32c=crc32c)

    store.put = put_when_there_is_room  # type: ignore[method-assign]
    async with world.producer("p", store) as producer:
        await feed(producer, 50)
    world.check(p=50)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.logs("away")
async def test_the_next_outage_is_told_again_and_one_that_was_cancelled_ends(caplog, autojump_clock) -> None:
    outage = Outage()
    first, second = (Backoff(name, 100.0, outage) for name in ("first", "second"))
    failure = StoreUnreachableError("away")
    caplog.set_level("DEBUG", "stepfs.producer")
    await first.failed(failure)
    await second.failed(failure)
    del first  # cancelled while it failed
    second.succeeded()
    await second.failed(failure)
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "INFO", "WARNING"]
