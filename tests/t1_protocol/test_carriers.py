"""Whatever carriers say, a reader folds the same state as from the log version by version."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from long_lakes import virtually

from stepfs.errors import CorruptError
from stepfs.format.commit import Commit, chain_digest, decode_commit, encode_commit
from stepfs.format.identity import LakeIdentity
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.snapshot import LogState, genesis
from stepfs.lake.control import Control
from stepfs.lake.identity import create_lake
from stepfs.lake.log.apply import ChainError, apply
from stepfs.lake.log.carriers import Newest
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer

TRUTHS = 4  # of each lie

pytestmark = pytest.mark.logs("others commit here")


def forged(truth: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Valid commits that tell other positions, and chain to each other."""
    found, digest = list[bytes](), None
    for body in truth:
        commit = decode_commit(body, "x")
        commit = replace(commit, position=b"\x01", prev_digest=digest or commit.prev_digest, carried=())
        found.append(encode_commit(commit))
        digest = chain_digest(commit.prev_digest, found[-1])
    return tuple(found)


def bent(truth: tuple[bytes, ...], rng: random.Random) -> tuple[bytes, ...]:
    place = rng.randrange(len(truth))
    body = bytearray(truth[place])
    body[rng.randrange(len(body))] ^= 1
    return (*truth[:place], bytes(body), *truth[place + 1 :])


class Liar:
    """In place of `Newest.carried_by`: an old writer, one that knows little, one that lies."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._right = Newest.carried_by
        self.said: Counter[str] = Counter()

    def of(self, newest: Newest, commit: Commit) -> Commit:
        commit = self._right(newest, commit)
        truth, rng = commit.carried, self._rng
        if not truth:
            return commit
        says = {
            "part": lambda: truth[rng.randrange(len(truth)) :],
            "nothing": tuple,
            "garbage": lambda: tuple(rng.randbytes(len(body)) for body in truth),
            "swapped": lambda: tuple(reversed(truth)),
            "short": lambda: truth[:-1],
            "bent": lambda: bent(truth, rng),
            "forged": lambda: forged(truth),
        }
        what = rng.choice([*says, *["truth"] * TRUTHS])
        self.said[what] += 1
        return replace(commit, carried=says[what]() if what in says else truth)


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
def test_a_reader_believes_no_carrier(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    liar = Liar(random.Random(seed))

    def told(newest: Newest, commit: Commit) -> Commit:
        return liar.of(newest, commit)

    monkeypatch.setattr(Newest, "carried_by", told)

    async def scenario() -> None:
        shared, identity = await written(seed, 150)
        states = read_singly(shared, identity)
        store = FaultyStore(shared, actor="reader", latency=lambda *_: 0.001)
        assert (await LogReader.open(store, identity)).state == states[-1]
        for before in states:
            reader = LogReader(store, identity, Control(store, identity), before)
            while reader.state.version < states[-1].version:
                await reader.poll()
                assert reader.state == states[reader.state.version + 1]

    virtually(scenario)
    assert liar.said.total() > 8


def test_mutant_carried_bytes_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepfs.lake.log.carriers._is_proved", lambda *_: True)
    with pytest.raises((AssertionError, ChainError)):
        for seed in range(3):
            test_a_reader_believes_no_carrier(seed, monkeypatch)


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
