"""What a commit costs, by count: at most three requests, whatever it holds and however long the history is."""

from __future__ import annotations

import pytest
import trio
from doubles.faulty_store import FaultyStore
from producer_world import World, append, feed, simulate
from scenarios import scenario

from stepfs.errors import StoreUnreachableError
from stepfs.format.ids import Step
from stepfs.format.node import NodeRecord
from stepfs.lake.fleet import FRESH_S, write_node
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer
from stepfs_producer.commit.backpressure import TRUST_S


async def requests_of(producer: AsyncProducer, world: World, first: int, count: int) -> list[str]:
    """Append `count` records, flush, and name the requests that were not uploads."""
    store = producer.running.writer._store
    store.counts.keys = []
    for number in range(first, first + count):
        await append(producer, number)
    await producer.flush()
    prefix = world.identity.lake_id + "/"
    names = [(verb, key.removeprefix(prefix).split("/")[0]) for verb, key in store.counts.keys]
    return [f"{verb} {room}" for verb, room in names if room != "data"]


@pytest.mark.parametrize("tgbs", [1, 7, 300])
@pytest.mark.parametrize("history", [0, 100, 1100])
@scenario(simulate)
async def test_an_uncontended_commit_takes_three_requests(world: World, tgbs: int, history: int) -> None:
    async with world.producer("old") as old:
        await feed(old, history)
        await old.retire()
    async with world.producer("p", uploads=1000) as producer:
        await feed(producer, 1)
        await producer.flush()
        before = producer.tally.commits
        requests = await requests_of(producer, world, 1, tgbs)
        commits = producer.tally.commits - before
        assert commits <= 1 + tgbs // 100
        once = ["get log", "create log", "get control"]
        hot = [name for name in requests if name in once]
        snapshots = [name for name in requests if name not in once]
        assert hot[: 3 * commits] == once * commits
        assert not snapshots or history % 512 + tgbs > 400, "snapshots come at segment boundaries only"


@scenario(simulate)
async def test_a_commit_beside_others_looks_at_the_one_before_unless_that_is_new(world: World) -> None:
    """Who has just read a commit that follows its own has seen that the log still has that."""
    async with world.producer("b") as b, world.producer("a") as a:
        for number in range(3):
            await feed(b, number + 1)
            await b.flush()
            rooms = await requests_of(a, world, 2 * number, 1)
            assert rooms == ["get log", "get log", "create log", "get control"], "one hit, one miss"
            rooms = await requests_of(a, world, 2 * number + 1, 1)
            assert rooms == ["get log", "get log", "create log", "get control"], "a miss, and the one before"


@scenario(simulate)
async def test_two_tgbs_uploaded_out_of_order_are_committed_in_order(world: World) -> None:
    """The first upload is the slowest; nothing overtakes it, and all follow in one commit."""
    store = world.store("p")
    slow = iter([5.0, 0.1, 0.2])
    async with world.producer("p", store) as producer:
        store._latency = lambda verb, size, rng: next(slow) if verb == "put" else 0.01
        await feed(producer, 3)
        await producer.flush()
        assert producer.tally.commits == 1
    world.check(p=3)


async def reader_behind(world: World, commits: int) -> tuple[FaultyStore, LogReader]:
    """A reader that has shown step 0, its store, and `commits` more that it has not looked for."""
    store = world.store("reader")
    reader = await LogReader.open(store, world.identity)
    async with world.producer("p") as producer:
        await feed(producer, 1)
        await producer.flush()
        await reader.poll()
        for number in range(1, 1 + commits):
            await append(producer, number)
            await producer.flush()
    return store, reader


@pytest.mark.parametrize("commits", [1, 2])
@scenario(simulate)
async def test_a_look_shows_what_it_found_before_it_looks_for_more(world: World, commits: int) -> None:
    """On a distant store each request is tens of milliseconds for which a reader waits."""
    store, reader = await reader_behind(world, commits)
    store.counts.keys = asked = []
    shown: list[tuple[int, int]] = []
    assert await reader.poll(lambda: shown.append((reader.state.next_step, len(asked))))
    assert shown == [(2, 2)], "the commit and the floor, then it is there"
    assert reader.state.next_step == 1 + commits
    rooms = [key.removeprefix(world.identity.lake_id + "/").split("/")[0] for _, key in asked]
    assert rooms == ["log", "control", *["log"] * commits, *["control"] * (commits - 1)]


@scenario(simulate)
async def test_what_a_failing_look_has_found_is_shown_by_the_next(world: World) -> None:
    """It was shown with the next commit, or after fifty looks: minutes, if the stream had ended."""
    store, reader = await reader_behind(world, 1)
    get, failed = store.get, []

    async def once(key: str, *, bytes_max: int = 1 << 20) -> bytes | None:
        if "/control/" in key and not failed:
            failed.append(key)
            raise StoreUnreachableError("503")
        return await get(key, bytes_max=bytes_max)

    store.get = once  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachableError):
        await reader.poll()
    assert reader.state.next_step == 1
    assert await reader.poll()
    assert reader.state.next_step == 2


@scenario(simulate)
async def test_nothing_is_asked_while_nothing_is_appended(world: World) -> None:
    store = world.store("p")
    async with world.producer("p", store) as producer:
        await feed(producer, 1)
        await producer.flush()
        before = store.counts.requests
        await world.settle(3600.0)
        assert store.counts.requests == before


@scenario(simulate)
async def test_a_lead_far_from_its_bound_is_looked_up_now_and_then_only(world: World) -> None:
    store = world.store("p")

    def looks(producer: AsyncProducer) -> int:
        asked = sum("/control/" in key for _, key in store.counts.keys or ())
        return asked - producer.tally.commits  # each of which reads the floor

    async with world.producer("p", store, max_lead=10_000) as producer:
        await feed(producer, 50, pause_s=TRUST_S / 50)
        await producer.flush()
        store.counts.keys = []
        before = producer.tally.commits
        await feed(producer, 100, pause_s=TRUST_S / 50)
        await producer.flush()
        assert 1 <= looks(producer) + before <= 2


@scenario(simulate)
async def test_a_commit_after_a_minute_of_rest_looks_again_for_the_lake_and_behind_holes(world: World):
    async with world.producer("p") as producer:
        await feed(producer, 1)
        await producer.flush()
        await trio.sleep(60.5)
        assert await requests_of(producer, world, 1, 1) == [
            "get lake.msgpack", "list nodes", "get log", "create log", "list control", "get control",
        ]  # fmt: skip


@pytest.mark.parametrize(("mounts", "seconds"), [(99, 0.0), (400, 0.4), (1000, 1.0), (5000, 1.0)])
@scenario(simulate)
async def test_a_commit_carries_more_where_many_mounts_follow(world: World, mounts: int, seconds: float) -> None:
    """Each GETs every commit. Records of mounts that were killed count no longer than those are shown."""
    store = FaultyStore(world.shared, actor="mounts")
    async with world.producer("p") as producer:
        await feed(producer, 1)
        for number in range(mounts):
            await write_node(
                store, world.identity, NodeRecord("run", f"n{number}", "/m", 1, "1", Step(1), Step(0), 0, 0)
            )
        await trio.sleep(60.5)
        times = []
        for total in range(2, 42):
            await feed(producer, total)
            await trio.sleep(0.05)
            times.append(producer.tally.commits)
        assert producer.running.pacer.fleet_s == seconds
        commits = times[-1] - times[0]
        assert commits >= 15 if not seconds else commits <= 2.0 / seconds + 2
        await trio.sleep(FRESH_S + 61)
        await feed(producer, 42)
        await trio.sleep(2)
        assert producer.running.pacer.fleet_s == 0.0
