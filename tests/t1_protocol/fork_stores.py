"""A fork of a small lake in two stores of one process, which a kill closes together."""

from __future__ import annotations

from dataclasses import dataclass

from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock
from lakework import list_groups
from process_store import ProcessStore
from producer_world import SLICES, World
from small_world import NEED, STEPS, clean, grow, process

from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.keys import LAKE
from stepfs.lake.fork import Cut, fork, group_name
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader

CUT = Cut(Step(10), Step(10), Step(12))


AROUND = [*range(NEED, 10), *range(12, STEPS)]


async def reclaimed(world: World) -> None:
    """The first live step is in the middle of a segment."""
    await grow(world)
    await clean(world)


@dataclass
class Stores:
    """One process's doors to the parent and to the place of the fork; a kill closes both."""

    parent: ProcessStore
    child: ProcessStore

    @classmethod
    def of(cls, world: World, place: ObjectMap, name: str) -> Stores:
        child = ProcessStore(place, actor=f"{name} there")
        child.url = "memory://the fork"  # the place has one name, whoever forks to it
        return cls(process(world, name), child)

    @property
    def pauses(self) -> int:
        return self.parent.pauses + self.child.pauses

    async def fork(self, identity: LakeIdentity, cut: Cut = CUT) -> LakeIdentity:
        parent = await LogReader.open(self.parent, identity)
        return await fork(parent, self.child, cut, TrioClock())


async def holders(world: World) -> set[str]:
    groups = await list_groups(process(world, "operator"), world.identity)
    return {name for name in groups if name.startswith(":fork/")}


async def is_whole(world: World, place: ObjectMap, steps: list[int]) -> LakeIdentity:
    """A stranger reads in the fork what those steps of the parent hold, and nothing of another fork is left."""
    stores = Stores.of(world, place, "stranger")
    identity = await open_lake(stores.child)
    reader = await LogReader.open(stores.child, identity)
    assert reader.state.next_step - reader.first_live_step == len(steps)
    for step, of_parent in enumerate(steps, start=reader.first_live_step):
        entry, truth = await reader.entry(Step(step)), world.ledger.steps[of_parent]
        assert (entry.tgb.key, entry.producer_id) == (truth.tgb.key, truth.producer_id)
        ref = entry.tgb.slice(SliceIndex(SLICES - 1))
        assert await stores.parent.read_into(entry.tgb.key, ref.offset, memoryview(bytearray(ref.length)))
    assert await holders(world) == {group_name(identity.lake_id)}
    strays = {key for key in place.objects if not key.startswith((f"{identity.lake_id}/", "probe/"))}
    assert strays == {LAKE}
    return identity
