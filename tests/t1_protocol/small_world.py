"""A small lake with a past, and every place where something else can happen to an operation on it.

Sizes are scaled down (segments of four steps, a snapshot every four versions), so that fourteen steps have all that
fourteen thousand would: sealed segments, a tail, snapshots to choose from, orphans of every kind.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import trio
from audit import audit
from decoded_once import decoded_once
from deterministic import run_seeded, scaled
from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from process_store import ProcessStore
from producer_world import World, feed

from stepfs.format.commit import CommitKind, encode_commit
from stepfs.format.control import RECORD_ID_BYTES, encode_control
from stepfs.format.ids import Epoch, Step
from stepfs.format.keys import control_prefix, data_key, index_prefix, log_prefix, numbered, snapshot_prefix
from stepfs.format.snapshot import LogState
from stepfs.lake.control import Control, Group
from stepfs.lake.decisions import Request, decide
from stepfs.lake.log.append import ownerless
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim.run import Report
from stepfs.store.api import Put

T = TypeVar("T")
Build = Callable[[World], Awaitable[None]]
SEGMENT = 4
TOTALS = {"a": 9, "b": 5}
STEPS = sum(TOTALS.values())
GROWN = 1  # the newest control record of a lake that has just grown
NEED = 9  # of the group "run"; neither at the edge of a segment nor of a commit
PAUSES_MAX = 600
_PAST = 1 << 40  # a seed of its own: what comes later must not draw the same ids again


def small(scenario: Callable[[World], Awaitable[T]], *, on: Build | None = None, seed: int = 0) -> T:
    """Run a scenario on a small world: a fresh one, or a copy of the one that `on` has built."""

    async def main() -> T:
        return await scenario(_copy(_built(on)) if on is not None else await _fresh())

    with _scales(), decoded_once():
        if on is not None:
            _built(on)
        return run_seeded(main, seed=seed)


async def _fresh() -> World:
    world = await World.create()
    world.ledger.segment_steps = SEGMENT
    return world


@cache
def _built(build: Build) -> World:
    async def main() -> World:
        world = await _fresh()
        await build(world)
        await world.settle()
        return world

    return run_seeded(main, seed=_PAST)


def _copy(world: World) -> World:
    shared = ObjectMap(objects=dict(world.shared.objects), _keys=sorted(world.shared.objects))
    ledger = world.ledger.onto(shared)
    ledger.control_times_s = [-math.inf] * len(ledger.controls)  # by the clock of a run that has ended
    return World(shared, world.identity, ledger)


def _scales() -> AbstractContextManager[None]:
    return scaled(SEGMENT_STEPS=SEGMENT, _VERSIONS_MAX=4, _MISSES_PER_FLOOR_PROBE=5)


def process(world: World, name: str) -> ProcessStore:
    return ProcessStore(world.shared, actor=name)


def group(world: World, name: str, store: ProcessStore | None = None) -> Group:
    """Also of a replica or a fork, whose names are no run's."""
    return Group(Control(store or process(world, f"group {name}"), world.identity, TrioClock()), name)


async def register(world: World, name: str, store: ProcessStore | None = None) -> None:
    """Register a group and hold the lake to what that promises."""
    world.ledger.promise(name, (await group(world, name, store).register()).need)


async def checkpoint(
    world: World, name: str, step: int, store: ProcessStore | None = None, *, keep: int | None = 1
) -> None:
    """The group resumes from `step`, and with keep=1 from nowhere else any more."""
    if keep == 1:
        world.ledger.promises[name] = max(step, world.ledger.promises.get(name, 0))
    await group(world, name, store).add(Step(step), keep=keep)
    world.ledger.promise(name, min(step, world.ledger.promises.get(name, step)))


async def grow(world: World) -> None:
    """Two producers, commits of one to three steps, a group in the middle, nothing reclaimed yet."""
    await register(world, "run")
    for until in range(2, 10, 2):
        for who, total in TOTALS.items():
            async with world.producer(who) as producer:
                await feed(producer, min(until if who == "a" else until // 2, total))
    for who, total in TOTALS.items():
        async with world.producer(who) as producer:
            await feed(producer, total)
    assert len(world.ledger.steps) == STEPS
    await checkpoint(world, "run", NEED)


async def lands_late(world: World, request: Request) -> bool:
    """The create of a writer that has died arrives only now; it was decided on when the lake had just grown."""
    newest = world.ledger.controls[GROWN]
    assert newest.groups["run"].kept == (NEED,)
    record = decide(GROWN, newest, request)
    assert record is not None
    body = encode_control(world.identity.lake_id, replace(record, record_id=b"l" * RECORD_ID_BYTES))
    slot = numbered(control_prefix(world.identity.lake_id), GROWN + 1)
    return await process(world, "wire").create(slot, body) is Put.CREATED


async def litter(world: World) -> None:
    """Uploads that no commit will ever name: crashed, of older epochs, doubles, of a producer that has retired."""
    store, lake_id = process(world, "litter"), world.identity.lake_id
    async with world.producer("c") as producer:
        await producer.retire()
    for who, epoch, seq in (("a", 1, 3), ("a", 2, 40), ("a", 6, 0), ("b", 1, 7), ("b", 6, 4), ("c", 1, 0), ("c", 1, 5)):
        await store.put(data_key(lake_id, who, Epoch(epoch), seq), [b"litter"])


async def clean(world: World, store: ProcessStore | None = None) -> Report:
    return await reclaim(store or process(world, "reclaimer"), world.identity, clock=TrioClock())


async def audited(world: World) -> None:
    """Nothing needed is missing, nothing else is there, and a stranger reads the same log."""
    await world.settle()
    reader = await LogReader.open(process(world, "stranger"), world.identity)
    audit(world.ledger, TOTALS, reader)
    for step in range(world.ledger.first_live_step, STEPS):
        world.ledger.check_entry("stranger", await reader.entry(Step(step)))
    assert not world.ledger.broken, world.ledger.broken


def killed_everywhere(
    before: Build, work: Callable[[World, ProcessStore], Awaitable[object]], after: Callable[[World], Awaitable[None]]
) -> int:
    """`work` is killed at its 1st, 2nd, … await, until it gets through; `after` looks at each. Returns how often."""

    async def one(kill_at: int, world: World) -> bool:
        store = process(world, "victim")
        with trio.CancelScope() as scope:
            store.kill_at, store.kill = kill_at, scope.cancel
            await work(world, store)
        store.dead = True
        if scope.cancelled_caught:
            await after(world)
        assert not world.ledger.broken, (kill_at, world.ledger.broken)
        return scope.cancelled_caught

    for kill_at in range(1, PAUSES_MAX):
        if not small(partial(one, kill_at), on=before, seed=kill_at):
            return kill_at - 1
    raise AssertionError(f"more than {PAUSES_MAX} awaits")


def inside_everywhere(
    before: Build,
    work: Callable[[World, ProcessStore], Awaitable[object]],
    meanwhile: Callable[[World], Awaitable[object]],
    after: Callable[[World], Awaitable[None]],
) -> int:
    """All of `meanwhile` happens inside the 1st, 2nd, … await of `work`; `after` looks at each. Returns how often."""

    async def one(at: int, world: World) -> bool:
        store = process(world, "interrupted")

        async def hook() -> None:
            await meanwhile(world)

        store.inside[at] = hook
        await work(world, store)
        if store.inside:
            return False
        await after(world)
        assert not world.ledger.broken, (at, world.ledger.broken)
        return True

    for at in range(1, PAUSES_MAX):
        if not small(partial(one, at), on=before, seed=at):
            return at - 1
    raise AssertionError(f"more than {PAUSES_MAX} awaits")


async def move_on(world: World, *, zombie_after: LogState | None = None, chained: bool = True) -> None:
    """Producers commit, trainers consume, a reclaimer deletes; then a sleeping writer takes a deleted slot."""
    async with world.producer("a") as producer:
        await feed(producer, 16)
    async with world.producer("d") as producer:
        await feed(producer, 3)
    await checkpoint(world, "run", len(world.ledger.steps) - 2)
    await clean(world)
    if zombie_after is not None:
        assert zombie_after.version + 1 < world.ledger.floor_version
        before = zombie_after if chained else replace(zombie_after, digest=b"?" * 32)
        commit = ownerless(before, CommitKind.SEAL, TrioClock())
        slot = numbered(log_prefix(world.identity.lake_id), commit.version)
        await process(world, "zombie").create(slot, encode_commit(commit))
        assert world.ledger.counts["zombie slots"] == 1


async def without_snapshots(world: World) -> None:
    await grow(world)
    store = process(world, "operator")
    for prefix in (snapshot_prefix, index_prefix):
        for entry in await store.list(prefix(world.identity.lake_id)):
            world.shared.remove(entry.key)


async def grown_and_littered(world: World) -> None:
    await grow(world)
    await litter(world)


def flipped(world: World, key: str) -> None:
    body = bytearray(world.shared.objects[key])
    body[len(body) // 2] ^= 4
    world.shared.put(key, bytes(body))
