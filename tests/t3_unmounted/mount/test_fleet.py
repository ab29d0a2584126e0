"""What a fleet of mounts costs its store in requests, counted in virtual time; nothing changes below 100 mounts."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import trio
from fleet import Fleet

MANY = 1000
pytestmark = pytest.mark.timeout(300)  # a hundred thousand requests


def learning(requests: Counter[tuple[str, str]]) -> float:
    """Share of the requests that only learn how many mounts there are."""
    return requests["list", "nodes"] / requests.total()


async def test_a_thousand_waiting_mounts_settle_and_ask_less_than_a_thousand_times_a_second(autojump_clock, nursery):
    fleet = await Fleet.of(MANY)
    fleet.start(nursery, waiting=True)
    await trio.sleep(5)
    assert (await fleet.requests(5)).total() / 5 <= 1300  # the storm of the start is over
    settled = await fleet.requests(20)
    assert settled.total() / 20 <= 1000
    assert settled["get", "log"] / 20 >= 500  # and a new step is seen within two seconds
    assert learning(settled) <= 0.1
    assert {mount.fleet.nodes for mount in fleet.mounts} == {MANY}


@pytest.mark.slow
async def test_a_thousand_idle_mounts_ask_half_as_often_as_alone(autojump_clock, nursery):
    fleet = await Fleet.of(MANY)
    fleet.start(nursery)
    await trio.sleep(15)
    settled = await fleet.requests(30)
    assert settled.total() / 30 <= 750
    dear = settled["put", "nodes"] + settled["list", "nodes"]
    assert dear / settled.total() <= 0.1
    assert learning(settled) <= 0.05


@pytest.mark.parametrize("waiting", [False, True])
async def test_ninety_nine_mounts_ask_exactly_as_often_as_one_each(autojump_clock, nursery, waiting):
    """Idle: the next version and the next control record, each every two seconds, so one request a second."""
    fleet = await Fleet.of(99)
    fleet.start(nursery, waiting=waiting)
    await trio.sleep(20.5)
    requests = await fleet.requests(10)
    looks = requests["get", "log"] + requests["get", "control"] + requests["get", "lake.msgpack"]
    assert looks == pytest.approx(99 * (110 if waiting else 10), rel=0.02)
    assert requests["get", "control"] == pytest.approx(99 * (12 if waiting else 5), rel=0.03)
    assert requests["put", "nodes"] == 99
    assert requests["list", "nodes"] <= 99
    assert requests.total() == looks + requests["put", "nodes"] + requests["list", "nodes"]
    assert {mount.follower.interval_s for mount in fleet.mounts} == {0.1 if waiting else 2.0}


async def test_an_idle_mount_with_a_group_asks_once_a_second_and_little_else(autojump_clock, nursery):
    """Every two seconds the next version, or sometimes the floor, and its group; the rest is less than one in ten."""
    fleet = await Fleet.of(1)
    fleet.start(nursery)
    await trio.sleep(60.5)
    requests = await fleet.requests(600)
    assert requests["get", "log"] + requests["get", "control"] == pytest.approx(600, abs=15)
    assert (requests["put", "nodes"], requests["list", "nodes"], requests["get", "lake.msgpack"]) == (
        40,
        7,
        5,  # and five looks whether its log is still the one that was read
    )
    assert requests.total() <= 1.1 * 600


async def test_mounts_that_are_left_alone_ask_as_before_after_a_while(autojump_clock, nursery):
    fleet = await Fleet.of(150)
    stayed = fleet.mounts[:5]
    leaving = trio.CancelScope()

    async def run_others():
        with leaving:
            async with trio.open_nursery() as others:
                for mount in fleet.mounts[5:]:
                    others.start_soon(partial(mount.run, waiting=False))

    nursery.start_soon(run_others)
    for mount in stayed:
        nursery.start_soon(partial(mount.run, waiting=True))
    await trio.sleep(30)
    assert {mount.fleet.nodes for mount in fleet.mounts} == {150}
    leaving.cancel()
    await trio.sleep(60)
    assert {mount.follower.interval_s for mount in stayed} == {0.1}


@pytest.mark.logs("cannot follow the lake", "the store answers again", "cannot read the record of group")
async def test_a_store_that_throttles_is_asked_less_until_it_recovers(autojump_clock, nursery):
    fleet = await Fleet.of(50)
    fleet.start(nursery, waiting=True)
    await trio.sleep(30)
    usual = await fleet.requests(10)
    fleet.server.throttles = True
    await trio.sleep(10)
    throttled = await fleet.requests(20)
    assert throttled["get", "log"] / 20 <= usual["get", "log"] / 10 / 50  # every 2 s without a factor: a twentieth
    fleet.server.throttles = False
    await trio.sleep(60)
    assert (await fleet.requests(10))["get", "log"] == pytest.approx(usual["get", "log"], rel=0.02)
