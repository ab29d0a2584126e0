"""Checkpoints, reclaim, seal and fork on real stores, driven through the public doors of the library."""

from __future__ import annotations

import pytest
from lakework import list_groups, reclaim

from stepfs._internal.clock import SystemClock
from stepfs.errors import RefusedError, WithdrawnError
from stepfs.format.ids import Step
from stepfs.format.keys import LAKE, data_prefix, log_prefix, number_of, snapshot_prefix
from stepfs.lake.control import Group
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.store.api import Put, Store
from stepfs.store.opening import open_store
from stepfs_producer import AsyncProducer
from stepfs_producer.commit.backpressure import BackPressure
from stepfs_producer.commit.uploads import CommitWindow

SLICES = 2


def payloads(step: int) -> list[bytes]:
    return [f"step {step} slice {index}".encode() for index in range(SLICES)]


async def lake_of(url: str, steps: int) -> Store:
    store = open_store(url)
    await create_lake(store, slices=SLICES)
    await produce(url, steps)
    return store


async def produce(url: str, steps: int, *, first: int = 0, producer_id: str = "p") -> None:
    async with AsyncProducer(url, producer_id=producer_id) as producer:
        for step in range(first, first + steps):
            await producer.append(payloads(step), position=step)
            if step % 7 == 0:
                await producer.flush()


async def read_step(reader: LogReader, step: int, origins: OriginStores | None = None) -> list[bytes]:
    entry = await reader.entry(Step(step))
    store = await origins.of(entry.tgb, reader.state) if origins else reader.store
    found = []
    for index in range(SLICES):
        ref = entry.tgb.slice(index)  # type: ignore[arg-type]
        buffer = bytearray(ref.length)
        assert await store.read_into(entry.tgb.key, ref.offset, memoryview(buffer)) == ref.length
        found.append(bytes(buffer))
    return found


async def test_only_what_every_group_has_behind_it_goes(lake_url: str) -> None:
    store = await lake_of(lake_url, 30)
    identity = await open_lake(store)
    assert (await reclaim(store, identity)).deleted_objects == 0
    fast, slow = Group.of(store, identity, "fast"), Group.of(store, identity, "slow")
    await fast.add(Step(25))
    await slow.register()
    assert (await reclaim(store, identity)).deleted_objects == 0
    await slow.add(Step(10))
    planned = await reclaim(store, identity, dry_run=True)
    assert len(await store.list(data_prefix(identity.lake_id))) == 30
    report = await reclaim(store, identity)
    assert planned == report
    # The data of ten steps; the log goes once a second snapshot stands above what it begins with.
    assert (report.first_live_step, report.deleted_objects) == (10, 10)
    reader = await LogReader.open(store, identity)
    assert reader.first_live_step == 10
    assert len(await store.list(data_prefix(identity.lake_id))) == 20
    assert [await read_step(reader, step) for step in range(10, 30)] == [payloads(step) for step in range(10, 30)]
    with pytest.raises(WithdrawnError, match="are reclaimed"):
        await fast.add(Step(9))
    assert (await list_groups(store, identity))["fast"].kept == (25,)
    await slow.retire()
    assert (await reclaim(store, identity)).first_live_step == 25
    with pytest.raises(RefusedError, match="max-percent"):
        await fast.add(Step(29))
        await fast.drop(Step(25))
        await reclaim(store, identity, max_percent=50)
    await store.aclose()


async def test_the_log_stays_short_and_producers_and_readers_go_on(lake_url: str) -> None:
    store = await lake_of(lake_url, 40)
    identity = await open_lake(store)
    group = Group.of(store, identity, "g")
    await group.add(Step(40), keep=1)
    report = await reclaim(store, identity)
    assert report.first_live_step == 40
    assert await store.list(data_prefix(identity.lake_id)) == []
    await produce(lake_url, 5, first=40)
    for step in (42, 44):
        await group.add(Step(step), keep=1)
        await reclaim(store, identity)
    prefixes = (snapshot_prefix(identity.lake_id), log_prefix(identity.lake_id))
    snapshots, log = [[number_of(at, entry.key) for entry in await store.list(at)] for at in prefixes]
    reader = await LogReader.open(store, identity)
    assert len(snapshots) == 2, "one of them may be damaged"
    assert snapshots[0]
    assert log == [*range(snapshots[0], reader.state.version + 1)]
    assert reader.state.next_step == 45
    assert await read_step(reader, 44) == payloads(44)
    assert reader.state.producers["p"].next_seq == 45
    await store.aclose()


async def test_a_fork_reads_the_parents_bytes_after_the_parent_let_go(lake_url: str) -> None:
    reclaimed = 5
    store = await lake_of(lake_url, 30)
    identity = await open_lake(store)
    group = Group.of(store, identity, "train")
    await group.add(Step(reclaimed), keep=1)
    await reclaim(store, identity)
    parent = await LogReader.open(store, identity)
    child_url = f"{lake_url}-fork"
    child_store = open_store(child_url)
    child_identity = await fork(parent, child_store, Cut(Step(12), Step(15), Step(20)), SystemClock())
    expected = [payloads(step) for step in (*range(reclaimed, 15), *range(20, 30))]

    await group.retire()
    await reclaim(store, identity)
    origins = OriginStores(child_store, open_store)
    child = await LogReader.open(child_store, child_identity)
    assert (child.first_live_step, child.state.next_step) == (reclaimed, 25)
    assert [await read_step(child, step, origins) for step in range(reclaimed, 25)] == expected

    await produce(child_url, 3, first=30)
    await child.poll()
    assert await read_step(child, 27, origins) == payloads(32)

    holder = Group.of(child_store, child_identity, "train")
    await holder.add(Step(20), keep=1)
    await reclaim(child_store, child_identity, origins=origins)
    assert (await reclaim(store, identity)).first_live_step == 25  # the child's step 20
    await holder.add(Step(26), keep=1)
    await reclaim(child_store, child_identity, origins=origins)
    assert await list_groups(store, identity) == {}
    for each in (origins, child_store, store):
        await each.aclose()


async def test_a_fork_that_is_there_holds_its_parent_whatever_was_answered(file_url, monkeypatch):
    """The create lands, its answer is lost, and the credentials expire before the slot can be read."""
    store = await lake_of(file_url, 6)
    parent = await LogReader.open(store, await open_lake(store))
    target = open_store(f"{file_url}-fork")
    create, get = target.create, target.get

    async def lands_unheard(key: str, body: bytes) -> Put:
        put = await create(key, body)
        if key != LAKE:
            return put
        monkeypatch.setattr(target, "get", refused_once)
        return Put.UNKNOWN

    async def refused_once(key: str, **options: int) -> bytes | None:
        monkeypatch.setattr(target, "get", get)
        raise RefusedError("the token expired")

    monkeypatch.setattr(target, "create", lands_unheard)
    with pytest.raises(RefusedError, match="expired"):
        await fork(parent, target, Cut(Step(3), Step(3), Step(3)), SystemClock())
    assert await open_lake(target)
    groups = await list_groups(store, parent.identity)
    assert len(groups) == 1


async def test_the_lead_in_a_fork_counts_live_steps(file_url: str) -> None:
    """It begins at the first step that the parent had not given up."""
    store = await lake_of(file_url, 60)
    await Group.of(store, await open_lake(store), "train").add(Step(50))
    await reclaim(store, await open_lake(store))
    parent = await LogReader.open(store, await open_lake(store))
    child_store = open_store(f"{file_url}-fork")
    identity = await fork(parent, child_store, Cut(Step(60), Step(60), Step(60)), SystemClock())
    child = await LogReader.open(child_store, identity)
    for bound, exceeded in ((11, False), (10, True)):
        lead = BackPressure(child.control, steps_max=bound)
        await lead.look()
        assert lead.exceeded(child.state, CommitWindow(0, memory_bytes_max=1), 1) is exceeded
    await child_store.aclose()
    await store.aclose()
