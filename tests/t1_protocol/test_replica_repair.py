"""A replica whose place had objects before, whose objects are damaged or lost, or which is put back to an older copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock
from producer_world import World
from replica_stores import COPY, Pair, copied, grows
from scenarios import scenario
from small_world import STEPS, checkpoint, clean, grow, process, small

from stepfs.errors import CorruptError, RefusedError, StoreUnreachableError
from stepfs.format.keys import (
    LAKE,
    control_prefix,
    data_prefix,
    index_prefix,
    log_prefix,
    numbered,
    snapshot_prefix,
)
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.replicate import Replica
from stepfs.lake.verify.data import verify_lake
from stepfs.lake.verify.metadata import verify_metadata
from stepfs.store.api import Put

Wrong = Callable[[bytes], bytes]
ALIKE = (data_prefix, log_prefix, index_prefix)  # equal bytes at both


def first_bit(body: bytes) -> bytes:
    return bytes([body[0] ^ 1]) + body[1:]


def middle_bit(body: bytes) -> bytes:
    half = len(body) // 2
    return body[:half] + bytes([body[half] ^ 4]) + body[half + 1 :]


WRONG: dict[str, Wrong] = {
    "first bit": first_bit,
    "middle bit": middle_bit,
    "zeros": lambda body: bytes(len(body)),
    "one byte longer": lambda body: body + b"\0",
    "ten bytes longer": lambda body: body + b"0123456789",
    "ten bytes shorter": lambda body: body[:-10],
    "empty": lambda _: b"",
}


def keys_under(world: World, place: ObjectMap, *prefixes: Callable[[str], str]) -> list[str]:
    under = tuple(prefix(world.identity.lake_id) for prefix in prefixes)
    return sorted(key for key in place.objects if key.startswith(under))


async def is_as_home(pair: Pair) -> None:
    """Every byte, and `verify` has nothing to say."""
    world = pair.world
    log = await pair.equals_home()
    for key in keys_under(world, pair.place, *ALIKE):
        assert pair.place.objects[key] == world.shared.objects[key], key
    assert await verify_metadata(pair.store, log.identity) == []
    found = await verify_lake(log, origins=OriginStores(log.store, lambda _: log.store))
    assert found.errors == []


@scenario(small, on=grow)
async def test_what_is_there_before_the_first_copy_is_believed_when_it_was_read(world: World) -> None:
    """A place that was filled for `--near`, by any tool."""
    pair = Pair(world)
    keys = [entry.tgb.key for entry in world.ledger.steps]
    for key, wrong in zip(keys, WRONG.values(), strict=False):
        pair.place.put(key, wrong(world.shared.objects[key]))
    for key in keys[len(WRONG) :]:
        pair.place.put(key, world.shared.objects[key])
    copier = pair.copier("it")
    based = [entry.tgb.key for entry in world.ledger.steps[: STEPS - 4]]  # of a segment, and not put again
    puts: list[str] = []
    put = copier.store.put

    async def counted(key: str, *body: object, **more: object) -> None:
        puts.append(key)
        await put(key, *body, **more)

    copier.store.put = counted
    await copied(copier)
    await is_as_home(pair)
    assert set(keys[: len(WRONG)]) <= set(puts)
    assert not set(based[len(WRONG) :]) & set(puts)


@scenario(small, on=grow)
async def test_a_first_copy_that_goes_on_does_not_read_again_what_it_has_put(world: World) -> None:
    pair = Pair(world)
    copier = pair.copier("it")
    create, read, asked, away = copier.store.create, copier.store.read_into, [], [True]

    async def creates(key: str, body: bytes) -> object:
        if key.startswith(control_prefix(world.identity.lake_id)) and away:
            raise StoreUnreachableError("away")
        return await create(key, body)

    async def reads(key: str, *more: object) -> int | None:
        asked.append(key)
        return await read(key, *more)

    copier.store.create, copier.store.read_into = creates, reads
    with pytest.raises(StoreUnreachableError):
        await copied(copier)
    before = len(asked)
    away.clear()
    await copied(copier)
    assert before >= 12
    assert [key for key in asked[before:] if not key.startswith("probe/")] == []
    await pair.equals_home()


@pytest.mark.logs("is unreadable, using an older one")
@pytest.mark.parametrize("wrong", WRONG)
@scenario(small, on=grow)
async def test_check_puts_again_what_is_damaged_or_lost(world: World, wrong: str) -> None:
    pair = Pair(world)
    await pair.replicated("it")
    for _ in range(4):
        await grows(world, 2)
    await pair.replicated("more")
    sound = dict(pair.place.objects)
    lost, index = keys_under(world, pair.place, data_prefix), keys_under(world, pair.place, index_prefix)
    snapshots, log = keys_under(world, pair.place, snapshot_prefix), keys_under(world, pair.place, log_prefix)
    for key in (lost[0], lost[-1], index[0], index[2]):
        pair.place.remove(key)
    for key in (lost[1], lost[-2], index[1], log[-1]):
        pair.place.put(key, WRONG[wrong](sound[key]))
    pair.place.put(snapshots[0], WRONG[wrong](sound[snapshots[0]]))
    pair.place.remove(log[2])  # that a snapshot covers
    with pytest.raises((CorruptError, AssertionError)):
        await is_as_home(pair)
    await pair.replicated("next", check=True)
    await is_as_home(pair)
    assert sound.keys() <= pair.place.objects.keys()


@pytest.mark.logs("is unreadable, using an older one")
@pytest.mark.parametrize("room", [log_prefix, snapshot_prefix])
@scenario(small, on=grow)
async def test_check_does_not_put_what_is_rotten_at_the_lake(world: World, room: Callable[[str], str]) -> None:
    pair = Pair(world)
    await pair.replicated("it")
    key = keys_under(world, pair.place, room)[0]
    sound = world.shared.objects[key]
    if room is log_prefix:  # that a snapshot covers
        pair.place.remove(key)
    else:
        pair.place.put(key, middle_bit(sound))
    there = dict(pair.place.objects)
    world.shared.put(key, middle_bit(sound))
    with pytest.raises(CorruptError, match=f"memory://home: {key}: .*put that object back, then replicate again"):
        await pair.replicated("next", check=True)
    assert pair.place.objects.get(key) == there.get(key)
    world.shared.put(key, sound)
    await pair.replicated("and again", check=True)
    await is_as_home(pair)


@scenario(small, on=grow)
async def test_check_goes_on_behind_what_the_lake_does_not_have_either(world: World) -> None:
    pair = Pair(world)
    await pair.replicated("it")
    keys = [entry.tgb.key for entry in world.ledger.steps]
    for key in (keys[0], keys[9], keys[13]):
        pair.place.put(key, middle_bit(pair.place.objects[key]))
    kept = world.shared.objects[keys[0]]
    world.shared.put(keys[0], middle_bit(kept))
    with pytest.raises(CorruptError, match=f"memory://home/{keys[0]}: step 0: .*restore the object"):
        await pair.replicated("next", check=True)
    assert [pair.place.objects[key] == world.shared.objects[key] for key in (keys[9], keys[13])] == [True, True]
    world.shared.put(keys[0], kept)
    await pair.replicated("and again", check=True)
    await is_as_home(pair)


@pytest.mark.logs("is unreadable, using an older one")
@scenario(small, on=grow)
async def test_a_damaged_end_of_the_log_is_named_with_the_command(world: World) -> None:
    pair = Pair(world)
    await pair.replicated("it")
    async with world.producer("c"):
        pass
    await pair.replicated("more")
    key = keys_under(world, pair.place, log_prefix)[-1]
    pair.place.put(key, middle_bit(pair.place.objects[key]))
    with pytest.raises(CorruptError, match=f"{key}.*stepfs replicate memory://home '{COPY}' --check"):
        await pair.replicated("next")
    await pair.replicated("as it says", check=True)
    await is_as_home(pair)


def put_back(pair: Pair, older: dict[str, bytes]) -> None:
    for key in [key for key in pair.place.objects if key not in older]:
        pair.place.remove(key)
    for key, body in older.items():
        pair.place.put(key, body)


@pytest.mark.parametrize("more", [1, 8], ids=["a commit", "a snapshot"])
@scenario(small, on=grow)
async def test_a_replica_that_was_put_back_gets_no_hole(world: World, more: int) -> None:
    pair = Pair(world)
    replica = await pair.replicated("it")
    older = dict(pair.place.objects)
    await grows(world, 2)
    while await replica.round():
        pass
    put_back(pair, older)
    await grows(world, more)
    with pytest.raises(StoreUnreachableError, match="was put back to an older copy"):
        await replica.round()
    assert (await LogReader.open(pair.store, replica.log.identity)).state.next_step == STEPS
    again = await Replica.open(replica.copier, clock=TrioClock())  # as the command does
    while await again.round():
        pass
    await is_as_home(pair)


@scenario(small, on=grow)
async def test_a_replica_that_was_put_back_is_noticed_though_nothing_is_new(world: World) -> None:
    pair = Pair(world)
    replica = await pair.replicated("it")
    older = dict(pair.place.objects)
    await grows(world, 2)
    while await replica.round():
        pass
    put_back(pair, older)
    await trio.sleep(60)
    with pytest.raises(StoreUnreachableError, match="was put back to an older copy"):
        await replica.round()


@scenario(small, on=grow)
async def test_a_version_without_an_answer_is_not_sent_again_behind_a_hole(world: World) -> None:
    pair = Pair(world)
    replica = await pair.replicated("it")
    older = dict(pair.place.objects)
    await grows(world, 1)
    while await replica.round():
        pass
    await grows(world, 1)
    store, create = replica.copier.store, replica.copier.store.create

    async def unanswered(key: str, body: bytes) -> Put:
        if "/log/" not in key:
            return await create(key, body)
        store.create = create  # type: ignore[method-assign]
        put_back(pair, older)
        return Put.UNKNOWN

    store.create = unanswered  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachableError, match="was put back to an older copy"):
        await replica.round()
    await pair.replicated("again")
    await is_as_home(pair)


@scenario(small, on=grow)
async def test_a_hole_is_filled_from_the_lake(world: World, monkeypatch) -> None:
    """As a replicator leaves it that never looked; no commit carries it."""
    monkeypatch.setattr("stepfs.lake.log.reader.carriers_of", lambda _: [])
    pair = Pair(world)
    replica = await pair.replicated("it")
    version = replica.log.state.version
    await grows(world, 1)
    await pair.replicated("more")
    for key in keys_under(world, pair.place, snapshot_prefix)[1:]:
        pair.place.remove(key)
    pair.place.remove(numbered(log_prefix(world.identity.lake_id), version + 1))
    with pytest.raises(CorruptError, match="is missing, but version"):
        await LogReader.open(pair.store, replica.log.identity)
    await pair.replicated("next")
    await is_as_home(pair)


@scenario(small, on=grow)
async def test_a_hole_whose_steps_the_lake_gave_up_is_told_apart(world: World) -> None:
    pair = Pair(world)
    await pair.replicated("it")
    older = dict(pair.place.objects)
    await grows(world, 8)
    await pair.replicated("more")
    await checkpoint(world, "run", len(world.ledger.steps))
    await clean(world)
    put_back(pair, older)
    with pytest.raises(RefusedError, match="has reclaimed steps from"):
        await pair.replicated("next")


@scenario(small, on=grow)
async def test_a_replica_that_is_gone_is_not_begun_again_by_whoever_knew_it(world: World) -> None:
    """Its file system may be away: the empty directory below is another disk."""
    pair = Pair(world)
    replica = await pair.replicated("it")
    put_back(pair, {})
    await grows(world, 2)
    with pytest.raises(StoreUnreachableError):
        await replica.round()
    with pytest.raises(RefusedError, match=f"{COPY} was a replica a moment ago, and nothing is there"):
        await Replica.open(replica.copier, clock=TrioClock())
    assert LAKE not in pair.place.objects
    await pair.replicated("a new one")
    assert await open_lake(process(world, "operator")) == world.identity
    await is_as_home(pair)
