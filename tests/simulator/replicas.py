"""A replica of the simulated lake: replicators that die, a run that reads it and reclaims it, and what must hold there.

The place sees every write and delete, as the ledger does at the lake: the log is a prefix of the lake's, data is there before
the version that names it, and nothing goes that the run there was promised.
"""

from __future__ import annotations

import random
from typing import cast

import trio
from cluster_world import World
from crc32c import crc32c
from doubles.faulty_store import Event, ObjectMap
from doubles.trio_clock import TrioClock
from following import read_step
from lakework import reclaim
from ledger import payload
from process_store import ProcessStore
from scenario import Life, ReplicaPlan

from stepfs.data.slices import Slices
from stepfs.errors import AbsentError, RefusedError, StoreUnreachableError
from stepfs.format.commit import chain_digest, decode_commit
from stepfs.format.control import GroupRecord, decode_control
from stepfs.format.identity import HOME_GROUP
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.keys import LAKE, control_prefix, data_prefix, log_prefix, number_of
from stepfs.format.tgb import Descriptor
from stepfs.lake.control import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.replicate import Copier, Replica
from stepfs.store.api import Progress, Store, ignore_progress

RUN = "there"
_GAPS = ("that were not copied", "which", "nothing is there")


class Place:
    """Where a replica is, until the lake has given up what was not copied: then another one begins elsewhere."""

    def __init__(self, world: World, url: str) -> None:
        self.world, self.url = world, url
        self.shared = ObjectMap()
        self.shared.watch = self._watch
        self.promised: int | None = None  # the first step of the run there
        self.is_held = False  # the lake was seen to hold what that run needs and is not copied
        self.step = 0
        self.end = 0  # the first step that its log does not have
        self._steps: dict[str, int] = {}  # of data that the log names
        self._first_live = 0

    def door(self, store: ProcessStore) -> ProcessStore:
        copy = store.beside(self.shared)
        copy.url = self.url
        return copy

    def run(self) -> GroupRecord | None:
        """The run's group, as the replica has it now."""
        prefix = control_prefix(self.world.ledger.identity.lake_id)
        newest = max((key for key in self.shared.objects if key.startswith(prefix)), default=None)
        return None if newest is None else decode_control(self.shared.objects[newest], newest)[1].groups.get(RUN)

    def _require(self, holds: bool, what: str) -> None:
        self.world.ledger.require(holds, f"{self.url}: {what}")

    def _watch(self, event: Event) -> None:
        lake_id = self.world.ledger.identity.lake_id
        if event.outcome == "created":
            key = event.keys[0]
            if number_of(log_prefix(lake_id), key) is not None:
                self._published(key)
            elif number_of(control_prefix(lake_id), key) is not None:
                self._first_live = decode_control(self.shared.objects[key], key)[1].first_live_step
                self._require(
                    self.promised is None or self._first_live <= self.promised,
                    f"{key} gives up steps below {self._first_live}, {self.promised} was promised",
                )
        elif event.verb == "delete" and event.outcome.endswith("keys"):
            for key in event.keys:
                step = self._steps.get(key)
                kept = self._first_live if self.promised is None else min(self.promised, self._first_live)
                self._require(step is None or step < kept, f"{key} of step {step} was deleted; kept from {kept}")
                self._require(key != LAKE, "its identity was deleted")

    def _published(self, key: str) -> None:
        ledger, body = self.world.ledger, self.shared.objects[key]
        commit = decode_commit(body, key)
        known = commit.version < len(ledger.digests) and ledger.digests[commit.version]
        self._require(chain_digest(commit.prev_digest, body) == known, f"{key} is not the lake's")
        for step, tgb in enumerate(commit.tgbs, start=commit.first_step):
            self._steps[tgb.key], self.end = step, max(self.end, step + 1)
            self._require(step < self._first_live or self.has(tgb), f"{key} names step {step}, which is not here")

    def has(self, tgb: Descriptor) -> bool:
        stored = self.shared.objects.get(tgb.key, b"")
        slices = [tgb.slice(SliceIndex(index)) for index in range(tgb.slices)]
        return len(stored) == tgb.size and all(
            crc32c(stored[ref.offset : ref.offset + ref.length]) == ref.crc32c for ref in slices
        )


class Copy:
    """The replica, wherever it is now. Its actors share it."""

    def __init__(self, world: World, plan: ReplicaPlan) -> None:
        self.world, self.plan = world, plan
        self.url = f"memory://{plan.name}"
        self.place = Place(world, self.url)

    def actors(self) -> list[tuple[Replicator | CopyRun | NearReader, tuple[Life, ...]]]:
        """Who takes part, with their lives."""
        plan = self.plan
        cast: list[tuple[Replicator | CopyRun | NearReader, tuple[Life, ...]]] = [
            (Replicator(self, f"{plan.name}r{n}"), lives) for n, lives in enumerate(plan.replicators)
        ]
        if plan.every:
            cast.append((CopyRun(self), plan.run))
        if plan.near is not None:
            cast.append((NearReader(self), plan.near))
        return cast

    def lost(self, place: Place, error: RefusedError) -> None:
        """`place` cannot go on. No error if nobody at the lake was known to keep what it lacks."""
        ledger = self.world.ledger
        ledger.counts["replicas lost"] += 1
        if not self.world.lying:
            ledger.require(any(why in str(error) for why in _GAPS), f"{self.url}: {error}")
            ledger.require(not place.is_held, f"{self.url}: {error}; the lake had held it for the run there")
        if place is self.place:
            self.place = Place(self.world, self.url)

    async def opened(self, store: ProcessStore, place: Place) -> Replica:
        copier = Copier(store, place.door(store))
        return await Replica.open(copier, keeps_all=self.plan.keeps_all, clock=self.world.clock)

    def check_hold(self, replica: Replica, place: Place) -> None:
        """By the records that the replicator has just seen, and without an await since. Where another replica was begun in place
        of one that cannot go on, under its name, the lake's group is the new one's, whoever still looks after the old one. One
        that slept in its look may have seen what another replicator has moved on from, and looks again.
        """
        if place is not self.place or replica.log._stale or replica.log.control.groups.get(RUN) != place.run():
            return
        groups, hold, end = replica.log.control.groups, replica.hold, replica.log.state.next_step
        ledger = self.world.ledger
        need = groups[RUN].need if RUN in groups else None
        if need is not None:
            known = hold.known if hold is not None else None
            live = replica.home.first_live_step
            wanted, at_most = (max(min(need, known_end - 1), live) for known_end in (end, max(end, place.end)))
            ledger.require(  # another replicator may have copied more while this one slept
                known is not None and wanted <= known.need <= at_most and (known.fork, known.replica) == ("", self.url),
                f"{self.url}: the lake holds {known} for a run that needs {need} of {end}",
            )
            place.is_held = place.is_held or wanted <= end
            ledger.counts["holds for a run there"] += 1
        elif hold is not None and hold.known is not None:
            ledger.require(self.plan.keeps_all and bool(hold.known.fork), f"{self.url}: the lake holds {hold.known}")

    async def end(self, store: ProcessStore) -> None:
        """All is quiet, and the lake's groups are as their runs left them: it is copied to the end, and let go."""
        if LAKE not in self.place.shared.objects:
            return
        try:
            replica = await self._caught_up(store)
            if self.place.promised is not None:
                run = Group.of(self.place.door(store), self.world.ledger.identity, RUN, self.world.clock)
                self.place.promised = None
                await run.retire()
            await replica.look()
        except RefusedError as error:
            self.lost(self.place, error)
            return
        self.check_hold(replica, self.place)
        self.world.ledger.counts["replicas"] += 1

    async def _caught_up(self, store: ProcessStore) -> Replica:
        replica = await self.opened(store, self.place)
        while await replica.round():
            pass
        await replica.look()
        self.check_hold(replica, self.place)
        return replica

    async def audit(self, store: ProcessStore) -> None:
        """After the lake's last reclaim: the same log, every live step, and nothing else once it is reclaimed, too."""
        place, ledger = self.place, self.world.ledger
        if LAKE not in place.shared.objects:
            return
        door = place.door(store)
        identity = await open_lake(door)
        await self._caught_up(store)
        await reclaim(door, identity, clock=TrioClock(), orphans=True)
        reader = await LogReader.open(door, identity)
        ledger.require(reader.state.digest == ledger.state.digest, f"{self.url} ends at another digest than the lake")
        live = ledger.steps[reader.first_live_step :]
        for entry in live:
            ledger.check_entry(self.url, await reader.entry(entry.step))
            ledger.require(place.has(entry.tgb), f"{self.url} lost step {entry.step}")
        data = {key for key in place.shared.objects if key.startswith(data_prefix(identity.lake_id))}
        ledger.require(
            data == {entry.tgb.key for entry in live}, f"{self.url} keeps data that nobody needs, or lacks some"
        )
        home, end = reader.control.groups[HOME_GROUP].need, reader.state.next_step
        if not identity.archive:
            ledger.require(home == min(ledger.first_live_step, end), f"{self.url}: group home needs {home} of {end}")
        ledger.require(
            reader.live_bytes == sum(entry.tgb.payload_bytes for entry in live),
            f"{self.url} counts {reader.live_bytes} live bytes",
        )


class Replicator:
    """`stepfs replicate --every`."""

    def __init__(self, copy: Copy, name: str) -> None:
        self.copy, self.world, self.name = copy, copy.world, name

    async def main(self, store: ProcessStore) -> bool:
        copy, over = self.copy, self.world.over
        place, replica = copy.place, None
        while not over.is_set():
            try:
                if replica is None or place is not copy.place:
                    place = copy.place
                    replica = await copy.opened(store, place)
                    copy.check_hold(replica, place)
                while await replica.round():
                    pass
            except StoreUnreachableError:
                replica = None
                self.world.ledger.counts["replicators cut short"] += 1
            except RefusedError as error:
                replica = None
                if not str(error).endswith("replicate again") and "cannot hold a lake" not in str(error):
                    copy.lost(place, error)
            with trio.move_on_after(copy.plan.every_s):
                await over.wait()
        return True


class CopyRun:
    """A run that trains at the replica, keeps one checkpoint there, and reclaims it."""

    def __init__(self, copy: Copy) -> None:
        self.copy, self.world, self.name = copy, copy.world, f"{copy.plan.name}t"

    async def main(self, store: ProcessStore) -> bool:
        over = self.world.over
        while not over.is_set():
            place = self.copy.place
            if LAKE in place.shared.objects:
                try:
                    await self._train(store, place)
                except StoreUnreachableError:
                    return over.is_set()
                except RefusedError:
                    if not self.world.lying:  # a reclaim that an old listing misleads
                        raise
            with trio.move_on_after(1.0):
                await over.wait()
        return True

    async def _train(self, store: ProcessStore, place: Place) -> None:
        ledger, over, every = self.world.ledger, self.world.over, self.copy.plan.every
        door = place.door(store)
        identity = await open_lake(door)
        run = Group.of(door, identity, RUN, self.world.clock)
        need = (await run.register()).need
        if place.promised is None:
            place.promised = need
        place.step = max(place.step, place.promised)
        reader = await LogReader.open(door, identity)
        while not over.is_set() and place is self.copy.place:
            while place.step < reader.state.next_step and not over.is_set():
                await read_step(self.name, ledger, door, reader, Step(place.step))
                ledger.counts["steps read there"] += 1
                place.step += 1
                if place.step % every == 0:
                    place.promised = place.step
                    await run.add(Step(place.step), keep=1)
                    await reclaim(door, identity, clock=self.world.clock)
            await reader.poll()
            with trio.move_on_after(0.5):
                await over.wait()


class Unsteady:
    """The replica as `--near` may find it: requests that hang, fail, find nothing, or get other bytes."""

    def __init__(self, door: ProcessStore, rng: random.Random) -> None:
        self.url, self._door, self._rng = door.url, door, rng

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, landed: Progress = ignore_progress
    ) -> int | None:
        what = self._rng.choice(("well", "well", "well", "absent", "other bytes", "away", "hangs"))
        if what == "hangs":
            await trio.sleep(self._rng.choice((1.0, 30.0, 10_000.0)))
        elif what == "absent":
            return None
        elif what == "away":
            raise StoreUnreachableError(f"{self.url}: away")
        size = await self._door.read_into(key, offset, buffer)
        if what == "other bytes" and size:
            buffer[self._rng.randrange(size)] ^= 1
        landed(size or 0)
        return size


class NearReader:
    """A mount of the lake with `--near` the replica: reads each step that is live, in order, and gets the lake's bytes."""

    def __init__(self, copy: Copy) -> None:
        self.copy, self.world, self.name = copy, copy.world, f"{copy.plan.name}n"
        self.rng = self.world.rng(self.name)

    async def main(self, store: ProcessStore) -> bool:
        world, place = self.world, self.copy.place
        try:
            reader = await LogReader.open(store, world.ledger.identity)
            near = Unsteady(place.door(store), self.rng)
            slices = Slices(store, memory_bytes=1 << 20, near=cast("Store", near), deadline_s=60.0)
            async with trio.open_nursery() as nursery:
                await nursery.start(slices.run)
                step = 0
                while not world.over.is_set() and place is self.copy.place:
                    step = max(step, reader.first_live_step)
                    if step < reader.state.next_step:
                        await self._read(slices, reader, Step(step))
                        step += 1
                    elif not await reader.poll():
                        with trio.move_on_after(0.5):
                            await world.over.wait()
                nursery.cancel_scope.cancel()
        except* StoreUnreachableError:
            pass  # and begins again
        return world.over.is_set()

    async def _read(self, slices: Slices, reader: LogReader, step: Step) -> None:
        ledger = self.world.ledger
        try:
            entry = await reader.entry(step)
            slices.request([(entry, [SliceIndex(0)])])
            for index in map(SliceIndex, range(entry.tgb.slices)):
                handle = slices.open(entry, index)
                try:
                    read = bytes(await handle.read(0, handle.length))
                finally:
                    handle.close()
                good = read == payload(entry.producer_id, entry.tgb.seq, index)
                ledger.require(good, f"{self.name} read other bytes at step {step} slice {index}")
        except AbsentError:
            ledger.require(step < ledger.first_live_step, f"{self.name} cannot read step {step}, which is live")
        ledger.counts["blocks read near"] += slices.counts.near_hits
        slices.counts.near_hits = 0
