"""A lake and its replica in two stores, which a kill of the process between them closes together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trio
from doubles.faulty_store import Event, ObjectMap
from doubles.trio_clock import TrioClock
from lakework import list_groups, reclaim
from process_store import ProcessStore
from producer_world import SLICES, World, feed
from small_world import process

from stepfs.format.commit import decode_commit
from stepfs.format.control import GroupRecord, decode_control
from stepfs.format.identity import REPLICA_GROUP
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.keys import LAKE, component, control_prefix, log_prefix, number_of
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import log_contains
from stepfs.lake.replicate import Copier, Replica
from stepfs.lake.verify.data import TgbCheck

COPY = "memory://the copy"
HOLD = f"{REPLICA_GROUP}{component(COPY)}"


async def grows(world: World, steps: int = 1) -> None:
    """Each producer of the world makes so many more."""
    for who in ("a", "b"):
        async with world.producer(who) as producer:
            await feed(producer, (producer.position or 0) + steps)


async def home_hold(world: World) -> GroupRecord | None:
    """What the lake keeps for the replica."""
    return (await list_groups(process(world, "operator"), world.identity)).get(HOLD)


async def copied(copier: Copier, **options: Any) -> Replica:
    """As `stepfs replicate` without --every."""
    replica = await Replica.open(copier, clock=TrioClock(), **options)
    while await replica.round():
        pass
    await replica.look()
    return replica


@dataclass
class Pair:
    """A world and the place of its replica, where nothing may be named that is not there, at no moment."""

    world: World
    place: ObjectMap = field(default_factory=ObjectMap)
    turn: trio.Lock = field(default_factory=trio.Lock)
    broken: list[str] = field(default_factory=list)
    logs: dict[str, bytes] = field(default_factory=dict)  # all that the lake's log has ever held

    def __post_init__(self) -> None:
        self.place.watch = self._watch
        self.copied_world()

    def copied_world(self) -> None:
        prefix = log_prefix(self.world.identity.lake_id)
        self.logs |= {key: body for key, body in self.world.shared.objects.items() if key.startswith(prefix)}

    def copier(self, name: str) -> Copier:
        """The doors of one process: its pauses, kills and freezes are those of `home`."""
        home = process(self.world, name)
        home.url = "memory://home"
        store = home.beside(self.place)
        store.url = COPY
        return Copier(home, store)

    async def opened(self, name: str) -> Replica:
        return await Replica.open(self.copier(name), clock=TrioClock())

    async def replicated(self, name: str, **options: Any) -> Replica:
        return await copied(self.copier(name), **options)

    @property
    def store(self) -> ProcessStore:
        store = ProcessStore(self.place, actor="stranger there")
        store.url = COPY
        return store

    def first_live(self) -> int:
        prefix = control_prefix(self.world.identity.lake_id)
        newest = max(key for key in self.place.objects if key.startswith(prefix))
        return decode_control(self.place.objects[newest], newest)[1].first_live_step

    def _watch(self, event: Event) -> None:
        """What a log version names is there before it, whoever looks and whenever."""
        prefix = log_prefix(self.world.identity.lake_id)
        if event.keys[0] == LAKE and event.outcome == "created":
            newest = max((key for key in self.place.objects if key.startswith(prefix)), default=None)
            if newest and decode_commit(self.place.objects[newest], newest).next_step < self.first_live():
                self.broken.append("it is a lake before its log reaches its first step")
        for key in event.keys:
            if event.verb != "create" or event.outcome != "created" or number_of(prefix, key) is None:
                continue
            body = self.place.objects[key]
            self.copied_world()
            if self.logs.get(key) != body:
                self.broken.append(f"{key} is not the lake's")
            commit = decode_commit(body, key)
            for step, tgb in enumerate(commit.tgbs, start=commit.first_step):
                if step >= self.first_live() and tgb.key not in self.place.objects:
                    self.broken.append(f"{key} names step {step}, which is not here")

    async def is_sound(self) -> LogReader | None:
        """A stranger reads every live step of the replica, whose log is the lake's. None: it is no lake yet."""
        assert not self.broken, self.broken
        if LAKE not in self.place.objects:
            return None
        store = self.store
        identity = await open_lake(store)
        assert identity.replica_of
        reader = await LogReader.open(store, identity)
        home, state = process(self.world, "auditor"), reader.state
        self.copied_world()
        if log_prefix(identity.lake_id) + f"{state.version:020d}" in self.world.shared.objects:
            assert await log_contains(home, identity, state)
        for number in range(reader.first_live_step, state.next_step):
            entry, truth = await reader.entry(Step(number)), self.world.ledger.steps[number]
            assert (entry.tgb, entry.producer_id) == (truth.tgb, truth.producer_id)
            assert entry.tgb.slices == SLICES
            body = self.place.objects.get(entry.tgb.key)
            assert body is not None, f"step {number} is not in the replica"
            check = TgbCheck(entry.tgb)
            check.feed(memoryview(body))
            assert not check.finish()
            ref = entry.tgb.slice(SliceIndex(0))
            assert await store.read_into(entry.tgb.key, ref.offset, memoryview(bytearray(ref.length))) == ref.length
        return reader

    async def reclaimed_there(self) -> int:
        report = await reclaim(self.store, await open_lake(self.store), clock=TrioClock(), orphans=True)
        return report.deleted_objects

    async def equals_home(self) -> LogReader:
        """It has all, and the digest of the lake's head."""
        reader = await self.is_sound()
        assert reader is not None
        home = await LogReader.open(process(self.world, "auditor"), self.world.identity)
        assert (reader.state.version, reader.state.digest) == (home.state.version, home.state.digest)
        return reader
