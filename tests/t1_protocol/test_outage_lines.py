"""What a producer says about an outage: one line when it begins, however many uploads it meets, and none by mistake."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from producer_world import World, feed, simulate
from scenarios import scenario

from stepfs.errors import StoreUnreachableError
from stepfs.store.api import Buffer
from stepfs_producer.backoff import Backoff, Outage


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
