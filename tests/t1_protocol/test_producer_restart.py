"""Producers that are killed, frozen, fenced, restarted, or on a hostile store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

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
from doubles.trio_clock import TrioClock
from ledger import payload
from process_store import ProcessStore
from producer_world import SLICES, World, append, feed, simulate
from scenarios import scenario

from stepfs.errors import FencedError, SealedError, StoreUnreachableError, UsageError
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Buffer
from stepfs_producer.backoff import Backoff, Outage


async def killed_then_restarted(world: World, kill_at: int) -> bool:
    """One life ended at its `kill_at`-th await, then one to the end. False once the first life gets that far by itself."""
    with trio.CancelScope() as scope:
        store = world.store("p", seed=kill_at)
        store.kill_at, store.kill = kill_at, scope.cancel
        async with world.producer("p", store) as producer:
            await feed(producer, 3)
            await producer.flush()
            await feed(producer, 6)
    if scope.cancelled_caught:
        await trio.sleep(kill_at % 3)
    async with world.producer("p", world.store("p2", seed=kill_at)) as producer:
        assert producer.position == (world.ledger.published.get("p") or None)
        await feed(producer, 8)
    await world.settle()
    world.check(p=8)
    return scope.cancelled_caught


def test_killed_at_any_await_and_restarted() -> None:
    kill_at = 1
    while simulate(partial(killed_then_restarted, kill_at=kill_at), seed=kill_at):
        kill_at += 1
    assert kill_at > 30, "the first life has many awaits, and was killed at each"


async def frozen_then_fenced(world: World, freeze_at: int) -> bool:
    """SIGSTOP at an await, a successor takes over, SIGCONT a minute later. False once it never froze.

    Frozen before its epoch commit it is the zombie that starts last, and fences the successor: also one live.
    """
    zombie_store = ProcessStore(world.shared, actor="zombie", seed=freeze_at)
    zombie_store.freeze_at, zombie_store.freeze_s = freeze_at, 60.0
    fenced: set[str] = set()
    epochs: dict[str, int] = {}

    async def zombie() -> None:
        async with world.producer("p", zombie_store) as producer:
            epochs["zombie"] = producer.epoch
            await feed(producer, 3)
            await producer.flush()
            await feed(producer, 6)

    async def successor() -> None:
        await trio.sleep(5.0)
        async with world.producer("p", world.store("successor")) as producer:
            epochs["successor"] = producer.epoch
            await feed(producer, 8)
            await producer.flush()
            await trio.sleep(120.0)
            await feed(producer, 9)

    async def watched(life: Callable[[], Awaitable[None]]) -> None:
        try:
            await life()
        except FencedError:
            fenced.add(life.__name__)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched, zombie)
        nursery.start_soon(watched, successor)
    await world.settle()
    froze = zombie_store.pauses >= freeze_at
    if froze and epochs["zombie"] < epochs["successor"]:
        assert "successor" not in fenced
        world.check(p=9)
    async with world.producer("p") as last:
        await feed(last, 10)
    world.check(p=10)
    assert len(fenced) < 2
    return froze


def test_a_zombie_frozen_at_any_await_publishes_nothing_after_its_successor() -> None:
    freeze_at = 1
    while simulate(partial(frozen_then_fenced, freeze_at=freeze_at), seed=freeze_at):
        freeze_at += 1
    assert freeze_at > 30


@scenario(simulate)
async def test_a_fenced_producer_says_so_in_append_and_flush_for_ever(world: World) -> None:
    with pytest.raises(FencedError, match="epoch 2 has taken over from epoch 1"):
        async with world.producer("p") as old:
            await append(old, 0)
            await old.flush()
            async with world.producer("p", world.store("new")) as new:
                await feed(new, 2)
                await new.flush()
                await append(old, 1)
                with pytest.raises(FencedError):
                    await old.flush()
                with pytest.raises(FencedError):
                    await append(old, 2)
                await feed(new, 3)
            await old.flush()
    world.check(p=3)


@scenario(simulate)
async def test_a_failure_waits_for_the_caller_and_cancels_nothing_of_its_own(world: World) -> None:
    """The caller may be in the middle of anything; it learns of the failure from the producer, not by cancellation."""
    with pytest.raises(FencedError):
        async with world.producer("p") as old:
            async with world.producer("p", world.store("new")):
                await append(old, 0)
                await trio.sleep(30.0)
                assert old._failure is not None
                await trio.sleep(30.0)
            await trio.sleep(30.0)
            await append(old, 1)


@pytest.mark.parametrize("seed", range(20))
def test_of_racing_starts_exactly_one_lives(seed: int) -> None:
    async def scenario(world: World) -> None:
        ended: list[str] = []

        async def race(actor: str) -> None:
            try:
                async with world.producer("p", world.store(actor, seed=seed)) as producer:
                    await trio.sleep(30.0)
                    await feed(producer, 5)
            except FencedError:
                ended.append("fenced")
            else:
                ended.append("finished")

        async with trio.open_nursery() as nursery:
            for actor in ("a", "b", "c"):
                nursery.start_soon(race, actor)
        assert sorted(ended) == ["fenced", "fenced", "finished"]
        assert world.ledger.state.producers["p"].epoch == 3
        world.check(p=5)

    simulate(scenario, seed=seed)


@scenario(simulate)
async def test_an_exception_abandons_what_is_pending_and_a_clean_end_does_not(world: World) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with world.producer("p") as producer:
            await feed(producer, 1)
            await producer.flush()
            await append(producer, 1)
            raise KeyError("mine")
    await world.settle()
    world.check(p=1)
    async with world.producer("p") as producer:
        assert producer.position == 1
        await feed(producer, 2)
    world.check(p=2)


@scenario(simulate)
async def test_retiring_flushes_fences_and_can_be_undone_by_a_restart(world: World) -> None:
    async with world.producer("p") as producer:
        await feed(producer, 2)
        await producer.retire()
        with pytest.raises(UsageError, match="closed"):
            await append(producer, 2)
    state = world.ledger.state.producers["p"]
    assert (state.retired, state.epoch, state.next_seq) == (True, 2, 2)
    async with world.producer("p") as producer:
        assert (producer.position, producer.epoch) == (2, 3)
        await feed(producer, 3)
    world.check(p=3)


@scenario(simulate)
async def test_a_sealed_lake_ends_producers_and_lets_no_new_ones_start(world: World) -> None:
    with pytest.raises(SealedError, match="no more steps"):
        async with world.producer("p") as producer:
            await feed(producer, 1)
            await producer.flush()
            assert await seal(await LogReader.open(world.store("operator"), world.identity), TrioClock())
            await append(producer, 1)
    with pytest.raises(SealedError):
        async with world.producer("q"):
            raise AssertionError("started")
    world.check(p=1)


@scenario(simulate)
async def test_payloads_reused_by_the_caller_do_not_reach_the_log(world: World) -> None:
    async with world.producer("p") as producer:
        for number in range(3):
            buffers = [bytearray(payload("p", number, index)) for index in range(SLICES)]
            await producer.append(buffers, position=number + 1)
            for buffer in buffers:
                buffer[:] = b"\0" * len(buffer)
    world.check(p=3)


HOSTILE = {
    LOST_REQUEST: 0.02, LOST_RESPONSE: 0.03, RESET_BEFORE: 0.03, RESET_AFTER: 0.05, ERROR_500: 0.02,
    ERROR_500_APPLIED: 0.02, THROTTLED_503: 0.02, CONFLICT_409: 0.05, OWN_412: 0.05, delayed(3.0): 0.02,
    delayed(20.0, wait_s=15.0): 0.01,
}  # fmt: skip


FAR = "trying on for|not written|raise max_delay"


@pytest.mark.logs(FAR)
@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(10, 25))]
)
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
