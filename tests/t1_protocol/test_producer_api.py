"""What a caller can do wrong, and what holds it back: values refused with numbers in the message, bounded waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
import trio
from doubles.faulty_store import FaultyStore
from producer_world import SLICES, World, append, feed, simulate
from scenarios import scenario

from stepfs.errors import AbsentError, FencedError, RefusedError, UsageError
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.store.api import Buffer, Put
from stepfs_producer import AsyncProducer
from stepfs_producer.commit.uploads import UNCOMMITTED_FACTOR

BATCH = [b"x"] * SLICES


@scenario(simulate)
async def test_a_lake_is_never_created_and_a_lying_store_never_trusted(world: World) -> None:
    class Liar(FaultyStore):
        async def create(self, key: str, body: bytes) -> Put:
            await self.put(key, [body])
            return Put.CREATED

    with pytest.raises(AbsentError, match="stepfs init"):
        async with AsyncProducer("memory://", producer_id="p", store=FaultyStore()):
            raise AssertionError("started")
    with pytest.raises(RefusedError):
        async with world.producer("p", Liar(world.shared, actor="liar")):
            raise AssertionError("started")
    world.check()


@scenario(simulate)
async def test_not_started_closed_and_used_twice(world: World) -> None:
    producer = world.producer("p")
    with pytest.raises(UsageError, match="has not been started"):
        await producer.append(BATCH, position=0)
    async with producer:
        with pytest.raises(UsageError, match="runs once"):
            await producer.__aenter__()
    with pytest.raises(UsageError, match="closed"):
        await producer.append(BATCH, position=0)
    with pytest.raises(UsageError, match="runs once"):
        await producer.__aenter__()


@scenario(simulate)
async def test_append_waits_for_nothing_but_the_budget(world: World) -> None:
    """With commits out of reach appends go on until the bound, and stop there, and go on after."""
    store = world.store("p")
    stuck = trio.Event()
    async with world.producer("p", store, max_pending_bytes=2_000) as producer:
        create = store.create

        async def stuck_create(key: str, body: bytes) -> Put:
            await stuck.wait()
            return await create(key, body)

        store.create = stuck_create  # type: ignore[method-assign]
        with trio.move_on_after(60.0):
            await feed(producer, 10_000)
        pending = producer.running.pending
        bound = UNCOMMITTED_FACTOR * 2_000
        assert bound - 200 < pending.uncommitted_bytes <= bound
        stopped_at = producer.next_seq
        assert producer.committed_seq == 0
        stuck.set()
        for number in range(stopped_at, stopped_at + 50):
            await append(producer, number)
    world.check(p=stopped_at + 50)


@scenario(simulate)
async def test_memory_is_bounded_while_uploads_are_slow(world: World) -> None:
    store = world.store("p")
    most = 0
    async with world.producer("p", store, max_pending_bytes=1_000, uploads=3) as producer:
        store._latency = lambda verb, size, rng: 1.0 if verb == "put" else 0.01
        for number in range(100):
            await append(producer, number)
            most = max(most, producer.running.pending.memory_bytes)
    assert 800 < most <= 1_000
    world.check(p=100)


@scenario(simulate)
async def test_a_cancelled_append_never_happened(world: World) -> None:
    store = world.store("p")
    async with world.producer("p", store, max_pending_bytes=100) as producer:
        store._latency = lambda verb, size, rng: 5.0 if verb == "put" else 0.01
        await append(producer, 0)
        with trio.move_on_after(1.0) as scope:
            await append(producer, 1)
        assert scope.cancelled_caught
        assert producer.next_seq == 1
        await append(producer, 1)
    world.check(p=2)


@scenario(simulate)
async def test_concurrent_appends_get_dense_seqs(world: World) -> None:
    world.shared.watch = None
    async with world.producer("p", max_pending_bytes=50) as producer:
        seqs: list[int] = []

        async def one(number: int) -> None:
            seqs.append(await producer.append([b"%d" % number] * SLICES, position=number))

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one, number)
        assert sorted(seqs) == list(range(40))


@scenario(simulate)
async def test_every_append_that_waits_is_told_when_the_producer_has_failed(world: World) -> None:
    """Also those that had not reached the place where one waits when it failed."""
    store = world.store("p")
    told = 0
    with suppress(FencedError):
        async with world.producer("p", store, max_pending_bytes=100) as producer:
            store._latency = lambda verb, size, rng: 5.0 if verb == "put" else 0.01
            await append(producer, 0)

            async def one(number: int) -> None:
                nonlocal told
                try:
                    await append(producer, number)
                except FencedError:
                    told += 1

            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for number in range(1, 4):
                        nursery.start_soon(one, number)
                    await trio.sleep(1)
                    producer._fail(FencedError("a newer one"))
    assert told == 3


@scenario(simulate)
async def test_the_first_failure_is_kept_and_ends_all_other_work(world: World) -> None:
    store = world.store("p")
    with pytest.raises(FencedError, match="the first"):
        async with world.producer("p", store, uploads=1) as producer:
            store._latency = lambda verb, size, rng: 5.0 if verb == "put" else 0.01
            for number in range(5):
                await append(producer, number)
            await trio.sleep(1.0)
            producer._fail(FencedError("the first"))
            producer._fail(AbsentError("the second"))
            await trio.sleep(0.0)
            before = store.counts.requests
            await trio.sleep(60.0)
            assert store.counts.requests == before
            await producer.flush()


@pytest.mark.logs("held back by max_lead")
@scenario(simulate)
async def test_producers_stop_at_their_lead_over_the_slowest_group(world: World):
    groups = [Group.of(world.store("trainer"), world.identity, name) for name in ("fast", "slow")]
    await groups[0].add(Step(1000))
    await groups[1].add(Step(0))
    async with world.producer("p", max_lead=10) as producer:
        with trio.move_on_after(60.0):
            await feed(producer, 100)
        await producer.flush()
        first = producer.next_seq
        assert 8 <= first <= 12
        await groups[1].add(Step(5), keep=1)
        with trio.move_on_after(60.0):
            for number in range(first, 100):
                await append(producer, number)
        assert first + 3 <= producer.next_seq <= first + 7
        await groups[1].retire()
        for number in range(producer.next_seq, 60):
            await append(producer, number)
    world.check(p=60)


@pytest.mark.logs("no consumer group is registered")
@scenario(simulate)
async def test_without_any_group_the_lead_counts_from_the_first_live_step(world: World, caplog):
    async with world.producer("p", max_lead=10) as producer:
        with trio.move_on_after(60.0):
            await feed(producer, 100)
        await producer.flush()
        assert producer.next_seq == 10
    assert "no consumer group is registered; mount with --group" in caplog.text


@scenario(simulate)
async def test_a_trickle_is_committed_at_once(world: World) -> None:
    async with world.producer("p") as producer:
        for number in range(10):
            appended_s = trio.current_time()
            await append(producer, number)
            await producer.flush()
            assert trio.current_time() - appended_s < 0.2
            await trio.sleep(7.0)


@scenario(simulate)
async def test_a_producer_overwrites_nothing_and_deletes_only_its_probes(world: World) -> None:
    class Once(FaultyStore):
        async def put(self, key: str, parts: Sequence[Buffer], *, crc32c: int | None = None) -> None:
            assert key not in self.shared.objects
            await super().put(key, parts, crc32c=crc32c)

    for until in (300, 600):
        async with world.producer("p", Once(world.shared, actor="p"), max_lead=10_000) as producer:
            await feed(producer, until)
            if until == 600:
                await producer.retire()
    rooms = {key.removeprefix(f"{world.identity.lake_id}/").split("/")[0] for key in world.shared.objects}
    assert {"log", "index", "snapshot"} <= rooms
    deleted = [key for event in world.shared.trace if event.verb == "delete" for key in event.keys]
    assert deleted
    assert all(key.startswith("probe/") for key in deleted)
