"""What a fleet of mounts costs its store in requests, counted in virtual time; nothing changes below 100 mounts."""

from __future__ import annotations

import pytest
import trio
from fleet import Fleet

MANY = 1000
pytestmark = pytest.mark.timeout(300)  # a hundred thousand requests


async def test_a_thousand_waiting_mounts_settle_and_ask_less_than_a_thousand_times_a_second(autojump_clock, nursery):
    fleet = await Fleet.of(MANY)
    fleet.start(nursery, waiting=True)
    assert (await fleet.requests(10)).total() / 10 <= 1300  # with the storm of the start
    settled = await fleet.requests(8)
    assert settled.total() / 8 <= 1000
    assert settled["get", "log"] / 8 >= 500  # and a new step is seen within two seconds


@pytest.mark.nightly
async def test_a_thousand_idle_mounts_ask_half_as_often_as_alone(autojump_clock, nursery):
    fleet = await Fleet.of(MANY)
    fleet.start(nursery)
    await trio.sleep(15)
    settled = await fleet.requests(30)
    assert settled.total() / 30 <= 750
    assert settled["put", "nodes"] / settled.total() <= 0.1


@pytest.mark.parametrize("waiting", [False, True])
async def test_ninety_nine_mounts_ask_exactly_as_often_as_one_each(autojump_clock, nursery, waiting):
    """Idle: the next version and the next control record, each every two seconds, so one request a second."""
    fleet = await Fleet.of(99)
    fleet.start(nursery, waiting=waiting)
    await trio.sleep(25.5)
    requests = await fleet.requests(10)
    looks = requests["get", "log"] + requests["get", "control"] + requests["get", "lake.msgpack"]
    assert looks == pytest.approx(99 * (110 if waiting else 10), rel=0.02)
    assert requests["get", "control"] == pytest.approx(99 * (12 if waiting else 5), rel=0.03)
    assert requests["put", "nodes"] == 99
    assert requests.total() == looks + requests["put", "nodes"]
    assert {mount.follower.interval_s for mount in fleet.mounts} == {0.1 if waiting else 2.0}


async def test_an_idle_mount_with_a_group_asks_once_a_second_and_little_else(autojump_clock, nursery):
    """Every two seconds the next version, or sometimes the floor, and its group; the rest is less than one in ten."""
    fleet = await Fleet.of(1)
    fleet.start(nursery)
    await trio.sleep(60.5)
    requests = await fleet.requests(600)
    assert requests["get", "log"] + requests["get", "control"] == pytest.approx(600, abs=15)
    # And five looks whether its log is still the one that was read.
    assert (requests["put", "nodes"], requests["get", "lake.msgpack"]) == (20, 5)
    assert requests.total() <= 1.1 * 600


@pytest.mark.logs("cannot follow the lake", "the store answers again", "cannot read the record of group")
async def test_a_store_that_throttles_is_asked_less_until_it_recovers(autojump_clock, nursery):
    fleet = await Fleet.of(25)
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
