"""A lake that a later version writes to as well: who must know what it has put there stops, and nothing of it is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from crc32c import crc32c
from doubles.object_map import ObjectMap
from doubles.trio_clock import TrioClock
from fork_stores import CUT, Stores
from producer_world import World, feed
from replica_stores import Pair, copied
from scenarios import scenario
from small_world import NEED, STEPS, clean, group, grow, process, register, small

from stepfs.errors import NewerFormatError
from stepfs.follow.changes import Changes
from stepfs.follow.follower import Follower
from stepfs.follow.waits import Waits
from stepfs.format.codec import HEADER_BYTES, Kind, encode, envelope_bytes, unpack
from stepfs.format.control import ControlRecord
from stepfs.format.ids import Step
from stepfs.format.keys import control_prefix, index_prefix, log_prefix, number_of, numbered, snapshot_prefix
from stepfs.lake.control import Control
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify.metadata import verify_metadata
from stepfs.lake.verify.repair import repair_control, repair_log
from stepfs.view.tree import Tree, ViewOptions

NO_ORIGINS: Any = OriginStores(None, pytest.fail)  # type: ignore[arg-type]
UPGRADE = "needs pins, which this stepfs does not have; upgrade stepfs"
LAST = STEPS - 1
Change = Callable[[Any], object]


def newest(world: World, prefix: Callable[[str], str]) -> str:
    return max(key for key in world.shared.objects if key.startswith(prefix(world.identity.lake_id)))


def changed(world: World, key: str, change: Change) -> None:
    """Have a later version write that object."""
    data = world.shared.objects[key]
    body = unpack(data[HEADER_BYTES:], key)
    change(body)
    world.shared.put(key, encode(Kind(data[6]), body))  # type: ignore[arg-type]


def add_next(world: World, prefix: Callable[[str], str], change: Change) -> None:
    """A later version takes the next slot, with an object that is like the one before but for a change."""
    last = newest(world, prefix)
    number = (number_of(prefix(world.identity.lake_id), last) or 0) + 1
    body: Any = unpack(world.shared.objects[last][HEADER_BYTES:], last)
    change(body)
    kind = Kind(world.shared.objects[last][6])
    world.shared.put(numbered(prefix(world.identity.lake_id), number), encode(kind, body))


async def record(world: World) -> ControlRecord:
    control = Control(process(world, "look"), world.identity)
    await control.refresh()
    return control.record


def put_pins(body: Any) -> None:
    body.update(pins=[[2, 3]])
    body["groups"][0].update(owner="alice")


@scenario(small, on=grow)
async def test_a_control_record_keeps_what_a_later_version_has_put_into_it(world: World) -> None:
    """Whatever this one changes: groups, a pause, what is given up."""
    changed(world, newest(world, control_prefix), put_pins)
    await register(world, "other")
    await group(world, "run").add(Step(NEED + 1), keep=1)
    await group(world, "other").retire()
    assert (await clean(world)).deleted_objects > 0
    found = await record(world)
    assert dict(found.later) == {"pins": [[2, 3]]}
    assert dict(found.groups["run"].later) == {"owner": "alice"}
    assert found.groups["run"].kept == (NEED + 1,)


async def produced(world: World) -> None:
    async with world.producer("a") as producer:
        await feed(producer, 99)


async def sealed(world: World) -> None:
    await seal(await LogReader.open(process(world, "operator"), world.identity), TrioClock())


async def forked(world: World) -> None:
    place = ObjectMap()
    try:
        await Stores.of(world, place, "operator").fork(world.identity)
    finally:
        assert not place.objects


WRITERS: dict[str, Callable[[World], Awaitable[object]]] = {
    "checkpoint": lambda world: group(world, "run").add(Step(LAST)),
    "register": lambda world: group(world, "run").register(),
    "retire": lambda world: group(world, "run").retire(),
    "reclaim": clean,
    "producer": produced,
    "seal": sealed,
    "fork": forked,
    "repair": lambda world: repair_log(process(world, "operator"), world.identity),
}


@pytest.mark.parametrize("what", WRITERS)
def test_who_lacks_what_writers_need_writes_nothing_and_reads_on(what: str) -> None:
    async def one(world: World) -> None:
        reader = await LogReader.open(process(world, "reader"), world.identity)
        changed(world, newest(world, control_prefix), lambda body: body.update(needs_of_writers=["pins"]))
        before = dict(world.shared.objects)
        with pytest.raises(NewerFormatError, match=f"control/.*: {UPGRADE}"):
            await WRITERS[what](world)
        assert {key for key in world.shared.objects if world.shared.objects[key] != before.get(key)} == set()
        assert before.keys() == world.shared.objects.keys()
        await reader.poll()
        assert (await LogReader.open(process(world, "stranger"), world.identity)).state == reader.state
        world.ledger.check_entry("reader", await reader.entry(Step(NEED)))

    small(one, on=grow)


def test_a_producer_that_runs_stops_where_writers_need_what_it_lacks() -> None:
    async def one(world: World) -> None:
        with pytest.raises(NewerFormatError, match=UPGRADE):
            async with world.producer("a") as producer:
                await feed(producer, 12)
                await producer.flush()
                add_next(world, control_prefix, lambda body: body.update(needs_of_writers=["pins"], id=b"l" * 16))
                for until in (13, 14, 15):
                    await feed(producer, until)
                    await producer.flush()

    small(one, on=grow)


@scenario(small, on=grow)
async def test_a_snapshot_keeps_what_a_later_version_has_put_into_it(world: World) -> None:
    def later(body: Any) -> None:
        body.update(schemas=["x"])
        body["producer_states"][0].update(host="h")

    before = newest(world, snapshot_prefix)
    changed(world, before, later)
    async with world.producer("a") as producer:
        await feed(producer, 20)
    after = newest(world, snapshot_prefix)
    assert after > before
    body: Any = unpack(world.shared.objects[after][HEADER_BYTES:], after)
    assert (body["schemas"], body["producer_states"][0]["host"]) == (["x"], "h")


@scenario(small, on=grow)
async def test_a_replica_begins_with_the_very_segments_and_snapshot_of_its_lake(world: World) -> None:
    """A later version may have put more into them than this one reads."""
    pair = Pair(world)
    prefix = index_prefix(world.identity.lake_id)
    segments = [key for key in world.shared.objects if key.startswith(prefix)]
    for key in segments:
        data = world.shared.objects[key]
        end = envelope_bytes(data, key)
        body: Any = unpack(data[HEADER_BYTES:end], key)
        fresh = encode(Kind.STEP_ENTRY, body | {"schemas": "x", "digest": body["digest"]})
        world.shared.put(key, fresh + data[len(fresh) :])
    changed(world, newest(world, snapshot_prefix), lambda body: body.update(schemas=["x"]))
    await copied(pair.copier("operator"))
    assert segments
    for key in (*segments, newest(world, snapshot_prefix)):
        assert pair.place.objects[key] == world.shared.objects[key]


@scenario(small, on=grow)
async def test_a_fork_keeps_what_a_later_version_has_put_into_the_entries_of_steps(world: World) -> None:
    """Its segments cannot be the very bytes: steps, versions and origins have other numbers there."""
    prefix, place = index_prefix(world.identity.lake_id), ObjectMap()
    for key in [key for key in world.shared.objects if key.startswith(prefix)]:
        data = world.shared.objects[key]
        end = envelope_bytes(data, key)
        body: Any = unpack(data[HEADER_BYTES:end], key)
        fresh = encode(Kind.STEP_ENTRY, body | {"schemas": f"of {body['step']}"})
        world.shared.put(key, fresh + data[len(fresh) :])
    child = await Stores.of(world, place, "operator").fork(world.identity)
    forked = [key for key in place.objects if key.startswith(index_prefix(child.lake_id))]
    kept = []
    for key in forked:
        data = place.objects[key]
        body = unpack(data[HEADER_BYTES : envelope_bytes(data, key)], key)
        kept.append((body["step"], body.get("schemas")))
    assert any(word for _, word in kept)
    assert kept == [(step, f"of {step}" if step < CUT.step else None) for step, _ in kept]  # the first of each segment


def of_format_2(data: bytes) -> bytes:
    """Sound, but in another format."""
    head = data[:7] + b"\2" + data[8:12]
    return head + crc32c(data[HEADER_BYTES:], crc32c(head)).to_bytes(4, "little") + data[HEADER_BYTES:]


@pytest.mark.parametrize("prefix", [log_prefix, snapshot_prefix, control_prefix])
@pytest.mark.parametrize("how", ["version", "needs"])
def test_a_check_calls_nothing_damaged_that_a_later_version_wrote_and_repairs_nothing(
    prefix: Callable[[str], str], how: str
) -> None:
    async def one(world: World) -> None:
        key = newest(world, prefix)
        if how == "version":
            world.shared.put(key, of_format_2(world.shared.objects[key]))
        else:
            changed(world, key, lambda body: body.update(needs=["pins"]))
        before, store = dict(world.shared.objects), process(world, "operator")
        with pytest.raises(NewerFormatError, match="upgrade stepfs"):
            await verify_metadata(store, world.identity)
        if prefix is not snapshot_prefix:  # readers go on from the one before
            with pytest.raises(NewerFormatError, match="upgrade stepfs"):
                await repair_control(store, world.identity, NO_ORIGINS)
                await repair_log(store, world.identity)
        assert world.shared.objects == before

    small(one, on=grow)


@pytest.mark.logs("cannot follow the lake .*upgrade stepfs", "the store answers again")
@pytest.mark.parametrize("change", [lambda body: body.update(kind="data2"), lambda body: body.update(needs=["intake"])])
def test_nobody_waits_for_what_a_later_version_commits(change: Change) -> None:
    """The kind that is reserved for it, or any need: what was there before is read on."""

    async def one(world: World) -> None:
        reader, changes = await LogReader.open(process(world, "reader"), world.identity), Changes()

        async def own_id() -> str:
            return world.identity.lake_id

        follower = Follower(reader, changes, 0.1, own_id, lambda: None)
        waits = Waits(Tree(reader, ViewOptions(wait=True)), reader, changes, deadline_s=300.0)
        async with trio.open_nursery() as nursery:
            for part in (follower.run, waits.run):
                await nursery.start(part)
            nursery.start_soon(_commit_soon, world, change)
            began_s = trio.current_time()
            for _ in range(2):
                with pytest.raises(NewerFormatError, match="upgrade stepfs"):
                    await waits.for_commit(Step(STEPS), 0)
            assert trio.current_time() - began_s < 6
            assert "upgrade stepfs" in str(follower.trouble)
            assert reader.newer is not None
            world.ledger.check_entry("reader", await reader.entry(Step(NEED)))
            world.shared.remove(newest(world, log_prefix))
            await trio.sleep(10)
            assert reader.newer is follower.trouble is None
            nursery.cancel_scope.cancel()

    small(one, on=grow)


async def _commit_soon(world: World, change: Change) -> None:
    await trio.sleep(3)
    add_next(world, log_prefix, change)
