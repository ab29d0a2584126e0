"""Segments that filled up and are not under `index/` yet: the producer was killed before it wrote them, or still writes.

The log has their steps until a confirmed snapshot covers them. Segments of four steps.
"""

from __future__ import annotations

from functools import partial

import pytest
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from process_store import ProcessStore
from producer_world import World, append, feed
from scenarios import scenario
from small_world import SEGMENT, checkpoint, inside_everywhere, process, register, small

from stepfs.errors import CorruptError, StoreUnreachableError
from stepfs.format.ids import SegmentIndex, Step
from stepfs.format.keys import data_prefix, extent, index_prefix, snapshot_prefix
from stepfs.lake.fork import Cut, fork
from stepfs.lake.log import reader as reader_room
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify.lake import verify_lake
from stepfs.store.api import Put

SEGMENTS = 6  # more than a reader keeps
STEPS = SEGMENTS * SEGMENT + 2


class NoSnapshots(FaultyStore):
    """A producer's way to a store that takes its commits, and then nothing more of it."""

    async def create(self, key: str, body: bytes) -> Put:
        if "/snapshot/" in key or "/index/" in key:
            raise StoreUnreachableError("no snapshot today")
        return await super().create(key, body)


async def unstored(world: World, steps: int = STEPS, *, store: type[FaultyStore] = NoSnapshots) -> None:
    """One commit a step, and a group that needs them all."""
    if "run" not in world.ledger.promises:
        await register(world, "run")
    async with world.producer("a", store(world.shared, actor="a")) as producer:
        for number in range(producer.next_seq, steps):
            await append(producer, number)
            await producer.flush()


async def _nothing_to_read(world: World) -> None:
    prefixes = index_prefix(world.identity.lake_id), snapshot_prefix(world.identity.lake_id)
    assert not [key for key in world.shared.objects if key.startswith(prefixes)]


async def reads_all(world: World, reader: LogReader) -> None:
    """In an order that leaves nothing in memory when it is asked for."""
    reader.segments.limit(0)
    live = range(reader.first_live_step, reader.state.next_step)
    assert live.stop == len(world.ledger.steps)
    for step in [*live[::SEGMENT], *reversed(live)]:
        world.ledger.check_entry("reader", await reader.entry(Step(step)))
        world.ledger.check_entry("reader", await reader.lone_entry(Step(step)))
    assert not world.ledger.broken, world.ledger.broken


pytestmark = pytest.mark.logs("snapshot of version .* not written")


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("stored", [0, 2 * SEGMENT], ids=["none is stored", "some are"])
def test_a_reader_has_the_steps_of_segments_that_nobody_has_stored(continued: bool, stored: int) -> None:
    """Also one that goes on from the state of another process, and one that has no room for all of them."""

    async def read(world: World) -> None:
        if stored:
            await unstored(world, stored, store=FaultyStore)
        await unstored(world)
        reader = await LogReader.open(process(world, "reader"), world.identity)
        if continued:
            reader = await LogReader.continued(process(world, "worker"), world.identity, reader.state)
        await reads_all(world, reader)

    small(read)


@scenario(small, on=unstored)
async def test_verify_finds_such_a_lake_sound_and_a_fork_of_it_has_every_step(world: World) -> None:
    await _nothing_to_read(world)
    store = process(world, "operator")
    reader = await LogReader.open(store, world.identity)
    reader.segments.limit(0)
    result = await verify_lake(reader, origins=OriginStores(store, pytest.fail))
    assert (result.steps, result.errors) == (STEPS, [])
    child = FaultyStore(ObjectMap(), actor="child")
    cut = Cut(Step(STEPS), Step(STEPS), Step(STEPS))
    identity = await fork(reader, child, cut, TrioClock())
    forked = await LogReader.open(child, identity)
    keys = [(await forked.entry(Step(step))).tgb.key for step in range(STEPS)]
    assert keys == [entry.tgb.key for entry in world.ledger.steps]


@pytest.mark.parametrize("below", range(1, STEPS + 1, 3))
def test_a_reclaim_deletes_what_lies_below_also_in_a_segment_that_is_not_stored(below: int) -> None:
    async def reclaims(world: World) -> None:
        await checkpoint(world, "run", below)
        await reclaim(process(world, "reclaimer"), world.identity, clock=TrioClock())
        data = {key for key in world.shared.objects if key.startswith(data_prefix(world.identity.lake_id))}
        assert data == {entry.tgb.key for entry in world.ledger.steps[below:]}
        await reads_all(world, await LogReader.open(process(world, "reader"), world.identity))

    small(reclaims, on=unstored)


def test_a_segment_may_be_stored_and_its_log_reclaimed_inside_every_await_of_a_read() -> None:
    """What is read is rebuilt, or fetched, or below the floor by now; it is never called damage."""

    async def reads(world: World, store: ProcessStore) -> None:
        state = (await LogReader.open(process(world, "former"), world.identity)).state
        reader = await LogReader.continued(store, world.identity, state)
        await reader.entry(Step(STEPS - SEGMENT))

    async def goes_on(world: World) -> None:
        async with world.producer("b") as producer:
            await feed(producer, SEGMENT)
        await checkpoint(world, "run", STEPS - SEGMENT)
        await reclaim(process(world, "reclaimer"), world.identity, clock=TrioClock())

    async def nothing(_world: World) -> None: ...

    assert inside_everywhere(unstored, reads, goes_on, nothing) > 10


@scenario(small)
async def test_a_segment_that_a_snapshot_covers_and_that_is_gone_is_damage(world: World) -> None:
    """The log still has its steps, and a reclaim may delete them there: so `verify` reports it."""
    await unstored(world, store=FaultyStore)
    world.shared.remove(extent(index_prefix(world.identity.lake_id), SegmentIndex(1)))
    reader = await LogReader.open(process(world, "reader"), world.identity)
    with pytest.raises(CorruptError, match="index segment is missing"):
        await reader.entry(Step(SEGMENT))


def never_rebuilt(patch: pytest.MonkeyPatch) -> None:
    """What is not under `index/` is lost, as it is for a reader that goes on from the state of another process."""

    async def absent(*_: object) -> None:
        return None

    patch.setattr(reader_room, "rebuilt_segment", absent)


def test_mutant_that_does_not_rebuild_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(world: World) -> None:
        known = (await LogReader.open(process(world, "reader"), world.identity)).state
        await reads_all(world, await LogReader.continued(process(world, "worker"), world.identity, known))

    never_rebuilt(monkeypatch)
    with pytest.raises(CorruptError):
        small(partial(read), on=unstored)
