"""Who counts as a mount of the fleet: who speaks, by the store's clock; not whom a kill kept from taking its record away."""

from __future__ import annotations

import socket

import trio
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from fleet import Fleet

from stepfs.format.ids import Step
from stepfs.format.node import NodeRecord
from stepfs.lake.fleet import count_nodes, write_node
from stepfs.lake.identity import create_lake

PODS = 60


async def test_mounts_killed_under_ever_new_host_names_slow_nobody_for_long(autojump_clock, nursery, monkeypatch):
    fleet = await Fleet.of(PODS)
    for generation in range(3):
        monkeypatch.setattr(socket, "gethostname", lambda name=f"pod-{generation}": name)
        async with trio.open_nursery() as pods:
            for mount in fleet.successors().mounts:
                pods.start_soon(mount.run_until_killed, 15.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "pod-3")
    fleet.start(nursery)
    await trio.sleep(15)
    assert {mount.fleet.is_large for mount in fleet.mounts} == {True}  # who was killed just now may be slow
    await trio.sleep(255)
    assert len(fleet.server.listed(f"{fleet.identity.lake_id}/nodes/")) == 4 * PODS
    requests = await fleet.requests(30)
    assert {mount.follower.interval_s for mount in fleet.mounts} == {2.0}
    assert requests["put", "nodes"] == 2 * PODS
    assert PODS * 15 <= requests["get", "control"] <= PODS * 16


async def test_mounts_that_speak_rarely_are_counted_all_the_same(autojump_clock, nursery):
    """The first records come apart: up to two and a half of the longest intervals lie between them."""
    fleet = await Fleet.of(300)
    fleet.start(nursery)
    for _ in range(9):
        await trio.sleep(10)
        assert {mount.fleet.nodes for mount in fleet.mounts} == {300}


async def test_a_record_counts_for_three_of_the_longest_intervals(autojump_clock):
    store = FaultyStore()
    identity = await create_lake(store, slices=1, clock=TrioClock())

    async def speak(number: int) -> None:
        await write_node(
            store,
            identity,
            NodeRecord(
                group="run",
                host=f"pod-{number}",
                directory="/mnt",
                pid=1,
                version="1",
                next_step=Step(0),
                read_to=Step(0),
                waited_permille=0,
                time_ms=0,
                interval_ms=10_000,
            ),
        )

    await speak(0)
    await trio.sleep(30)
    await speak(1)
    await trio.sleep(48)
    assert await count_nodes(store, identity) == 2
    await trio.sleep(1)
    assert await count_nodes(store, identity) == 1
    await speak(0)
    assert await count_nodes(store, identity) == 2
