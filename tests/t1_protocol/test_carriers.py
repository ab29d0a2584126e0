"""Whatever carriers say, a reader folds the same state as from the log version by version."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from long_lakes import virtually
from lying_carriers import lying_carriers

from stepfs.errors import CorruptError
from stepfs.format.commit import Commit, decode_commit, encode_commit
from stepfs.format.identity import LakeIdentity
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.snapshot import LogState, genesis
from stepfs.lake.control import Control
from stepfs.lake.identity import create_lake
from stepfs.lake.log.apply import ChainError, apply
from stepfs.lake.log.carriers import Newest
from stepfs.lake.log.reader import LogReader
from stepfs.lake.verify.repair import repair_log
from stepfs_producer import AsyncProducer

pytestmark = pytest.mark.logs("others commit here")


async def written(seed: int, commits: int) -> tuple[ObjectMap, LakeIdentity]:
    """A lake of two producers that race each other."""
    shared = ObjectMap()
    identity = await create_lake(FaultyStore(shared, latency=lambda *_: 0.001), slices=2, clock=TrioClock())
    rng = random.Random(seed)

    async def one(number: int) -> None:
        store = FaultyStore(shared, actor=f"p{number}", seed=seed + number)
        producer = AsyncProducer("memory://", producer_id=f"p{number}", store=store, clock=TrioClock(), max_delay=0.01)
        async with producer:
            for _ in range(commits // 2):
                await producer.append([b"x" * 8] * 2, position=None)
                if rng.random() < 0.9:
                    await producer.flush()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, 0)
        nursery.start_soon(one, 1)
    return shared, identity


def read_singly(shared: ObjectMap, identity: LakeIdentity) -> list[LogState]:
    states = [genesis(identity.lake_id, identity.slices)]
    while body := shared.objects.get(numbered(log_prefix(identity.lake_id), len(states) - 1)):
        states.append(apply(states[-1], decode_commit(body, "x"), body).state)
    return states


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_believes_no_carrier(seed: int) -> None:
    async def scenario() -> None:
        shared, identity = await written(seed, 150)
        states = read_singly(shared, identity)
        store = FaultyStore(shared, actor="reader", latency=lambda *_: 0.001)
        assert (await LogReader.open(store, identity)).state == states[-1]
        for before in states:
            for skims in (False, True):
                reader = LogReader(store, identity, Control(store, identity), before)
                while reader.state.version < states[-1].version:
                    await reader.poll(skims=skims)
                    assert reader.state == states[reader.state.version + 1]

    with lying_carriers(seed) as said:
        virtually(scenario)
    assert said.total() > 8


def test_mutant_carried_bytes_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepfs.lake.log.carriers._is_proved", lambda *_: True)
    with pytest.raises((AssertionError, ChainError)):
        for seed in range(3):
            test_a_reader_believes_no_carrier(seed)


@pytest.mark.logs("log version 130 cannot be read; version 135 has it")
@pytest.mark.parametrize("damage", ["none", "lost", "rotten"])
def test_a_reader_needs_few_requests_and_passes_what_is_lost_or_rotten(damage: str) -> None:
    async def scenario() -> int:
        shared, identity = await written(7, 330)
        last = read_singly(shared, identity)[-1]
        key = numbered(log_prefix(identity.lake_id), 130)
        if damage == "lost":
            shared.remove(key)
        elif damage == "rotten":
            shared.objects[key] = shared.objects[key][:-1] + b"?"
        store = FaultyStore(shared, actor="reader", latency=lambda *_: 0.001)
        reader = await LogReader.open(store, identity)
        assert reader.state == last
        return store.counts.get

    assert virtually(scenario) <= 40


def test_a_skim_is_four_requests_and_follows_the_carriers() -> None:
    """64 versions by each; at the end 8, then one at a time; the control record behind them."""

    async def scenario() -> list[tuple[int, int]]:
        shared, identity = await written(7, 700)
        states = read_singly(shared, identity)
        store, steps = FaultyStore(shared, actor="reader", latency=lambda *_: 0.001), []
        reader = LogReader(store, identity, Control(store, identity), states[1])
        await reader.control.refresh()
        while reader.state.version < states[-1].version:
            gets, version = store.counts.get, reader.state.version
            await reader.poll(skims=True)
            steps.append((store.counts.get - gets, reader.state.version - version))
        return steps

    steps = virtually(scenario)
    assert max(gets for gets, _ in steps) <= 4 + 1
    assert sum(versions for _, versions in steps) > 20 * len(steps)


@pytest.mark.logs("log version 130 cannot be read; version 135 has it")
def test_one_that_follows_passes_what_is_rotten() -> None:
    async def scenario() -> None:
        shared, identity = await written(7, 330)
        states = read_singly(shared, identity)
        key = numbered(log_prefix(identity.lake_id), 130)
        shared.objects[key] = shared.objects[key][:-1] + b"?"
        store = FaultyStore(shared, actor="reader", latency=lambda *_: 0.001)
        reader = LogReader(store, identity, Control(store, identity), states[130])
        await reader.poll()
        assert reader.state == states[reader.state.version + 1]
        assert reader.state.version > 130

    virtually(scenario)


@pytest.mark.parametrize("place", [127, -1])
def test_what_nothing_carries_is_damage(place: int) -> None:
    """The last carrier of a level, and what comes behind the last carrier."""

    async def scenario() -> None:
        shared, identity = await written(7, 330)
        version = range(read_singly(shared, identity)[-1].version + 1)[place]
        key = numbered(log_prefix(identity.lake_id), version)
        shared.objects[key] = shared.objects[key][:-1] + b"?"
        with pytest.raises(CorruptError, match=f"{version}"):
            await LogReader.open(FaultyStore(shared, actor="reader"), identity)

    virtually(scenario)


@pytest.mark.parametrize(("slices", "most"), [(8, 2.8), (64, 2.8)])
def test_carriers_cost_the_log_less_than_twice_as_much_again(slices: int, most: float) -> None:
    async def scenario() -> float:
        shared = ObjectMap()
        store = FaultyStore(shared, latency=lambda *_: 0.001)
        identity = await create_lake(store, slices=slices, clock=TrioClock())
        async with AsyncProducer("memory://", producer_id="p", store=store, clock=TrioClock()) as producer:
            for _ in range(200):
                await producer.append([b"x" * 8] * slices, position=None)
                await producer.flush()
        bodies = [body for key, body in shared.objects.items() if key.startswith(log_prefix(identity.lake_id))]
        bare = [encode_commit(replace(decode_commit(body, "x"), carried=())) for body in bodies]
        return sum(map(len, bodies)) / sum(map(len, bare))

    assert virtually(scenario) <= most


def test_a_version_that_cannot_be_read_is_no_end_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 9104554: the one before it was carried, and nothing proved that; all behind it were there."""
    right = Newest.carried_by

    def oldest(newest: Newest, commit: Commit) -> Commit:
        commit = right(newest, commit)
        return replace(commit, carried=commit.carried[:1])

    monkeypatch.setattr(Newest, "carried_by", oldest)

    async def scenario() -> None:
        shared, identity = await written(7, 60)
        key = numbered(log_prefix(identity.lake_id), 9)  # the next carrier has the eighth alone
        shared.objects[key] = shared.objects[key][:-1] + b"?"
        with pytest.raises(CorruptError, match="9: checksum mismatch"):
            await LogReader.open(FaultyStore(shared, actor="reader"), identity)

    virtually(scenario)


def test_a_repair_puts_back_what_is_carried() -> None:
    """Lost and rotten ones, two in a row; not the last of a level, nor what nothing carries yet."""

    async def scenario() -> None:
        shared, identity = await written(7, 330)
        head = read_singly(shared, identity)[-1].version
        keys = {version: numbered(log_prefix(identity.lake_id), version) for version in (0, 77, 78, 127, 200, head)}
        before = dict(shared.objects)
        for version, key in keys.items():
            if version in (0, 78):
                shared.remove(key)
            else:
                shared.objects[key] = shared.objects[key][:-1] + b"?"
        store = FaultyStore(shared, actor="operator", latency=lambda *_: 0.001)
        done = await repair_log(store, identity)
        assert [int(line.split()[2]) for line in done] == [200, 78, 77, 0]
        assert {version for version, key in keys.items() if shared.objects.get(key) != before[key]} == {127, head}
        assert await repair_log(store, identity) == []

    virtually(scenario)
