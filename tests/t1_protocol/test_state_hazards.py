"""The hazards of COMMIT.md that concern what a producer keeps in mind: state, its lake, its name. With mutants to be caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from ledger import payload
from producer_world import SLICES, World, append, caught, feed, reclaim_below, simulate
from scenarios import scenario

from stepfs.errors import RefusedError
from stepfs.format import snapshot as snapshot_format
from stepfs.format.ids import Epoch
from stepfs.format.keys import LAKE
from stepfs.format.snapshot import LogState
from stepfs.lake.identity import create_lake
from stepfs.lake.log import snapshots as log_snapshots
from stepfs.lake.log.reader import LogReader
from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit.loop import IDENTITY_CHECK_S
from stepfs_producer.commit.producer import TgbWriter
from stepfs_producer.commit.rebase import Incarnation
from stepfs_producer.commit.uploads import Item


async def hazard_06(world: World) -> None:
    """A producer is away so long that nothing of it is left but its state."""
    async with world.producer("away") as producer:
        await feed(producer, 3)
    async with world.producer("busy") as busy:
        await feed(busy, 2100)
        await busy.flush()
    await reclaim_below(world, 2050)
    async with world.producer("away") as producer:
        assert (producer.position, producer.next_seq) == (3, 3)
        await feed(producer, 5)
    world.check(away=5, busy=2100)


def test_hazard_06_producer_state_never_expires() -> None:
    simulate(hazard_06)


def test_hazard_06_mutant_that_expires_idle_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = snapshot_format.encode_snapshot

    def expire(state: LogState) -> bytes:
        recent = {name: known for name, known in state.producers.items() if state.version - known.version < 3}
        return keep(replace(state, producers=recent))

    monkeypatch.setattr(log_snapshots, "encode_snapshot", expire)
    with caught():
        simulate(hazard_06)


async def hazard_07(world: World) -> list[str]:
    """The lake is dropped and another one made under the same URL, with a producer still at work."""
    operator = world.store("operator")
    new_id = ""
    with pytest.raises(RefusedError, match="recreated"):
        async with world.producer("p") as producer:
            await append(producer, 0)
            await producer.flush()
            await operator.delete([entry.key for entry in await operator.list("")])
            new_id = (await create_lake(operator, slices=SLICES)).lake_id
            for number in range(1, 100):
                await producer.append([payload("p", number, i) for i in range(SLICES)], position=number)
                await producer.flush()
                await trio.sleep(IDENTITY_CHECK_S / 20)
    return [entry.key for entry in await operator.list("") if entry.key.startswith(new_id)]


def test_hazard_07_a_recreated_lake_is_noticed_and_never_written_to() -> None:
    assert simulate(hazard_07) == []


def test_hazard_07_mutant_that_never_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_loop, "IDENTITY_CHECK_S", float("inf"))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        simulate(hazard_07)


@scenario(simulate)
async def test_hazard_07_a_dropped_lake_is_noticed(world: World) -> None:
    operator = world.store("operator")
    with pytest.raises(Exception, match="not a lake") as caught:
        async with world.producer("p") as producer:
            await operator.delete([LAKE])
            await trio.sleep(IDENTITY_CHECK_S)
            await append(producer, 0)
    assert type(caught.value).__name__ == "AbsentError"


def test_hazard_08_no_two_uploads_share_a_name() -> None:
    """Two images of one process (fork, restored checkpoint) upload the same seq: neither overwrites the other."""

    async def scenario(world: World) -> set[str]:
        me = Incarnation("p", Epoch(1), b"i" * 16)
        item = Item(0, (b"x",), (1,), b"", 1)
        writers = [TgbWriter(world.store("p"), world.identity, me, at_once=1) for _ in range(2)]
        return {(await writer.write(item, writer.new_key(item))).key for writer in writers}

    assert len(simulate(scenario)) == 2


@scenario(simulate)
async def test_hazard_11_a_snapshot_is_of_a_committed_state_only(world: World) -> None:
    """What is handed to the snapshot writer is the state after a commit that passed the floor check."""
    async with world.producer("p") as producer:
        await feed(producer, 1100)
    store = world.store("reader")
    snapshots = await store.list(f"{world.identity.lake_id}/snapshot/")
    assert snapshots
    reader = await LogReader.open(store, world.identity)
    assert reader.state.digest == world.ledger.digests[-1]
