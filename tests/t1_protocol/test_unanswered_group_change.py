"""A change that nobody got an answer to may land later; what was recorded after it must not be undone by it."""

from __future__ import annotations

import pytest
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock

from stepfs.checkpoints.formats import Found, NextStep, Place
from stepfs.checkpoints.watch import Watch
from stepfs.errors import AbsentError, StoreUnreachableError
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake
from stepfs.store.api import Put


class SlowRequests(FaultyStore):
    """Its creates leave, are not answered, and have not arrived yet."""

    def __init__(self, shared):
        super().__init__(shared, actor="slow")
        self.under_way = []

    async def create(self, key, body):
        self.under_way.append((key, body))
        return Put.UNKNOWN


def retire(group):
    return group.retire()


def drop_all_but_newest(group):
    return group.add(Step(90), keep=1)


async def land(slow, store):
    for key, body in slow.under_way:
        await store.create(key, body)


def add(group):
    return group.add(Step(50))


def resumed(group):
    return group.resumed(Step(50))


async def begin_to_watch(group):
    """A mount starts, as after the death of the one that did not get its answer."""
    there = Found(frozenset({50}), frozenset())
    await group.register()
    await Watch(group, Place.parse("/unused"), NextStep("N"), look_at=lambda: there).look_once()


@pytest.mark.parametrize("unanswered", [retire, drop_all_but_newest])
@pytest.mark.parametrize("say", [add, resumed, begin_to_watch])
async def test_what_is_recorded_again_outlives_a_request_that_lands_late(patient_clock, unanswered, say):
    store = FaultyStore()
    identity = await create_lake(store, slices=1, clock=TrioClock())
    group = Group.of(store, identity, "run", TrioClock())
    await group.add(Step(50))
    slow = SlowRequests(store.shared)
    with pytest.raises(StoreUnreachableError):
        await unanswered(Group.of(slow, identity, "run", TrioClock()))
    await say(group)  # on record already
    await land(slow, store)
    assert 50 in (await group.read()).kept


async def test_a_retired_group_that_a_late_request_brings_back_keeps_what_it_says(autojump_clock):
    """A trainer adds a checkpoint to a retired group and dies. Nobody retires what is not there, so nothing is fenced."""
    store = FaultyStore()
    identity = await create_lake(store, slices=1, clock=TrioClock())
    group = Group.of(store, identity, "run", TrioClock())
    await group.add(Step(50))
    await group.retire()
    slow = SlowRequests(store.shared)
    with pytest.raises(StoreUnreachableError):
        await add(Group.of(slow, identity, "run", TrioClock()))
    with pytest.raises(AbsentError, match="never registered, or retired"):
        await group.retire()
    await land(slow, store)
    assert (await group.read()).kept == (50,)
    await group.retire()
    assert await group.read() is None
