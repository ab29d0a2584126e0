"""A change that nobody got an answer to may land later; what was recorded after it must not be undone by it."""

from __future__ import annotations

import pytest

from stepfs.clock import TrioClock
from stepfs.errors import StoreUnreachableError
from stepfs.format.ids import Step
from stepfs.lake.groups import Group
from stepfs.lake.identity import create_lake
from stepfs.store.api import Put
from stepfs.testing.faulty_store import FaultyStore


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


@pytest.mark.parametrize("unanswered", [retire, drop_all_but_newest])
@pytest.mark.parametrize("say", ["add", "resumed"])
async def test_what_is_recorded_again_outlives_a_request_that_lands_late(autojump_clock, unanswered, say):
    store = FaultyStore()
    identity = await create_lake(store, slices=1, clock=TrioClock())
    group = Group.of(store, identity, "run", TrioClock())
    await group.add(Step(50))
    slow = SlowRequests(store.shared)
    with pytest.raises(StoreUnreachableError):
        await unanswered(Group.of(slow, identity, "run", TrioClock()))
    await getattr(group, say)(Step(50))  # on record already
    for key, body in slow.under_way:
        await store.create(key, body)
    record = await group.read()
    assert not record.retired
    assert 50 in record.kept
