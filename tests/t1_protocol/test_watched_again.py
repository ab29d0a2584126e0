"""A checkpoint is written again, or dropped by another, while a change that said otherwise is still without an answer."""

from __future__ import annotations

import logging

import pytest
import trio
from controlled import reclaimed_below
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock

from stepfs.checkpoints.formats import Found, NextStep, Place
from stepfs.checkpoints.watch import Watch
from stepfs.errors import StoreUnreachableError
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake
from stepfs.store.api import Put


class SlowStore(FaultyStore):
    """While it is `slow`, creates leave it, are not answered, and have not arrived yet."""

    slow = False

    async def create(self, key: str, body: bytes) -> Put:
        if not self.slow:
            return await super().create(key, body)
        self.under_way = key, body
        return Put.UNKNOWN

    async def land(self) -> Put:
        self.slow = False
        return await super().create(*self.under_way)


class Node:
    """One mount's look at the directory; each has its own, because file systems differ in age."""

    def __init__(self, group: Group, *steps: int) -> None:
        store = group.control.store
        assert isinstance(store, FaultyStore)
        self.store = SlowStore(store.shared)
        self.group = Group.of(self.store, group.control.identity, "run", TrioClock())
        self.steps = frozenset(steps)
        self.barred: frozenset[int] = frozenset()  # another user's
        self.watch = Watch(
            self.group, Place.parse("/unused"), NextStep("N"), look_at=lambda: Found(self.steps, self.barred),
        )  # fmt: skip

    async def looks(self, *steps: int) -> None:
        self.steps = frozenset(steps)
        await self.watch.look_once()

    async def looks_unanswered(self, *steps: int) -> None:
        self.store.slow = True
        with pytest.raises(StoreUnreachableError):
            await self.looks(*steps)


async def group_of(*steps: int) -> Group:
    store = FaultyStore()
    group = Group.of(store, await create_lake(store, slices=1, clock=TrioClock()), "run", TrioClock())
    await group.replace(frozenset(map(Step, steps)))
    return group


async def kept(group: Group) -> tuple[int, ...]:
    record = await group.read()
    assert record is not None
    return record.kept


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.logs("resumes at step 6 is not recorded, because steps that it needs are reclaimed")
@pytest.mark.parametrize("barred", [frozenset(), frozenset({9})])
async def test_a_first_look_at_nothing_but_reclaimed_checkpoints_proves_nothing(patient_clock, barred):
    group = await group_of(7, 8)
    await reclaimed_below(group.control.store, group.control.identity, 7)
    node = Node(group)
    node.barred = barred
    for _ in range(4):
        await node.looks(6)
        await trio.sleep(1)
    assert await kept(group) == (7, 8)


async def _same_again(node: Node) -> None:
    """The checkpoint is there again: for this node nothing has changed, but its request is on its way."""
    await node.looks(26, 27)


async def _one_more(node: Node) -> None:
    await node.looks(26, 27, 28)


@pytest.mark.parametrize("then", [_same_again, _one_more])
async def test_a_change_without_an_answer_lands_after_no_later_look(patient_clock, then):
    group = await group_of(26, 27)
    node = Node(group)
    await node.looks(26, 27)
    await node.looks_unanswered(26)
    node.store.slow = False
    await then(node)
    await node.store.land()
    assert {26, 27} <= set(await kept(group))


async def test_a_change_without_an_answer_that_has_landed_is_mended_by_the_next_look(patient_clock):
    group = await group_of(26, 27)
    node = Node(group)
    await node.looks(26, 27)
    await node.looks_unanswered(26)
    await node.store.land()
    assert await kept(group) == (26,)
    await node.looks(26, 27)
    assert await kept(group) == (26, 27)


async def test_a_change_without_an_answer_does_not_bring_back_a_group_that_is_retired_meanwhile(patient_clock):
    group = await group_of(5, 6)
    node = Node(group)
    await node.looks(5, 6)
    await node.looks_unanswered(6)
    node.store.slow = False
    await group.retire()
    await node.looks(6)
    assert await group.read() is None


async def test_deleting_the_checkpoints_of_a_retired_group_does_not_bring_it_back(patient_clock):
    group = await group_of(5, 6, 7)
    node = Node(group)
    await node.looks(5, 6, 7)
    await group.retire()
    for steps in ((6, 7), (7,), ()):
        await node.looks(*steps)
        assert await group.read() is None
    await node.looks(8)
    assert await kept(group) == (8,), "a new one does: the run goes on"


async def test_what_the_record_lacks_is_added_without_a_change(patient_clock):
    """Whoever dropped it is gone, and nothing changes in the directory for hours; what is there costs no request."""
    group = await group_of(26, 27)
    node = Node(group)
    await node.looks(26, 27)
    await group.drop(Step(27))
    await node.group.read()  # as the mount does that follows its group
    await node.looks(26, 27)
    assert await kept(group) == (26, 27)
    requests = node.store.counts.requests
    for _ in range(20):
        await node.looks(26, 27)
    assert node.store.counts.requests == requests
