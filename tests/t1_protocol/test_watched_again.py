"""A trainer goes back and writes a checkpoint again, while some node still records what the directory held before.

Seeds 5016043 and 5016769 of the simulator: the others saw no gap, so they found nothing to add, and a checkpoint that
was there counted for nobody.
"""

from __future__ import annotations

import logging

import pytest
import trio
from controlled import newest_control, reclaimed_below
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock

from stepfs.checkpoints.formats import Found, Place
from stepfs.checkpoints.next_step import NextStep
from stepfs.checkpoints.watch import Watch
from stepfs.errors import StoreUnreachableError
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake
from stepfs.store.api import Put

LAG_S = 61.0


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


async def test_who_drops_a_checkpoint_keeps_all_that_it_sees(patient_clock):
    """Only one node sees that 27 goes; it comes back, and the other's next change drops 26."""
    group = await group_of(26, 27)
    one, other = Node(group), Node(group)
    for node in (one, other):
        await node.looks(26, 27)
    await one.looks(26)
    await other.looks(27, 28, 29)
    assert await kept(group) == (27, 28, 29)


async def test_an_old_look_recorded_late_never_raises_the_need_beyond_what_is_there(patient_clock):
    group = await group_of(5, 6, 7)
    late, other = Node(group), Node(group)
    for node in (late, other):
        await node.looks(5, 6, 7)
    await other.looks(7, 8, 9)
    await late.looks(6)  # from the moment between two lives of 7
    assert min(await kept(group)) <= 7
    await late.looks(7, 8, 9)
    assert await kept(group) == (7, 8, 9)


async def test_a_look_older_than_a_reclaim_drops_nothing(patient_clock, caplog):
    group = await group_of(5, 6, 7)
    late, other = Node(group), Node(group)
    for node in (late, other):
        await node.looks(5, 6, 7)
    await other.looks(7, 8, 9)
    await reclaimed_below(group.control.store, group.control.identity, 7)
    await late.looks(6)
    assert await kept(group) == (7, 8, 9)
    await late.looks(7, 8, 9)
    await late.looks(8, 9, 10)
    assert await kept(group) == (7, 8, 9, 10), "drops wait"
    await trio.sleep(LAG_S)
    await late.looks(8, 9, 10)
    assert await kept(group) == (8, 9, 10), "but not for ever"
    assert not warnings(caplog), "6 was on record once: the others dropped it"


@pytest.mark.logs("resumes at step 6 is not recorded, because steps that it needs are reclaimed")
async def test_a_first_look_older_than_a_reclaim_drops_nothing(patient_clock):
    group = await group_of(7, 8, 9)
    await reclaimed_below(group.control.store, group.control.identity, 7)
    late = Node(group)
    await late.looks(6, 8)
    assert await kept(group) == (7, 8, 9)
    await late.looks(8)
    await trio.sleep(LAG_S)
    await late.looks(8)
    assert await kept(group) == (8,), "what was deleted while nobody watched"


@pytest.mark.logs("resumes at step 6 is not recorded, because steps that it needs are reclaimed")
@pytest.mark.parametrize("barred", [frozenset(), frozenset({9})])
async def test_a_first_look_at_nothing_but_reclaimed_checkpoints_proves_nothing(patient_clock, barred):
    group = await group_of(7, 8)
    await reclaimed_below(group.control.store, group.control.identity, 7)
    node = Node(group)
    node.barred = barred
    for _ in range(4):
        await node.looks(6)
        await trio.sleep(LAG_S)
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


async def test_an_old_checkpoint_is_not_brought_back_by_a_request_of_a_node_that_has_seen_it_go(patient_clock):
    """The request says: 5 is there, 6 is not. No answer comes; 6 is back, 5 has gone, and so the record says."""
    group = await group_of(5, 6, 7)
    late, other = Node(group), Node(group)
    for node in (late, other):
        await node.looks(5, 6, 7)
    await other.looks(6, 7)
    await late.looks_unanswered(5, 7)
    late.store.slow = False
    await late.looks(6, 7)
    await late.store.land()
    assert await kept(group) == (6, 7)


async def test_what_the_record_lacks_for_a_minute_is_added_without_a_change(patient_clock):
    """Whoever dropped it is gone, and nothing changes in the directory for hours."""
    group = await group_of(26, 27)
    node = Node(group)
    await node.looks(26, 27)
    await group.drop(Step(27))
    await node.group.read()  # as the mount does that follows its group
    requests = node.store.counts.requests
    for _ in range(6):
        await node.looks(26, 27)
        await trio.sleep(10.1)
    assert node.store.counts.requests == requests, "looks without a change cost nothing"
    await node.looks(26, 27)
    assert await kept(group) == (26, 27)
    requests = node.store.counts.requests
    for _ in range(20):
        await node.looks(26, 27)
        await trio.sleep(10.1)
    assert node.store.counts.requests == requests


async def test_a_checkpoint_dropped_by_hand_stays_away_until_something_else_goes(patient_clock):
    """The directory decides: whoever wants a checkpoint to be gone deletes it there."""
    group = await group_of(5, 6)
    node = Node(group)
    await node.looks(5, 6)
    await group.drop(Step(5))
    await node.looks(5, 6, 7)
    assert await kept(group) == (6, 7)
    await node.looks(5, 7)
    assert await kept(group) == (5, 7)


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


async def test_a_node_behind_the_others_does_not_argue_with_them(patient_clock):
    """Each checkpoint is written, and the oldest deleted, before the second node sees either."""
    group = await group_of(1, 2)
    one, two = Node(group), Node(group)
    for node in (one, two):
        await node.looks(1, 2)
    before = (await newest_control(one.store, group.control.identity)).number
    for step in range(3, 13):
        shown = (step - 2, step - 1), (step - 2, step - 1, step), (step - 1, step)
        for steps in shown[1:]:
            await one.looks(*steps)
        for steps in shown[1:]:
            await two.looks(*steps)
        assert await kept(group) == (step - 1, step)
    after = (await newest_control(one.store, group.control.identity)).number
    assert after - before == 20, "two records for a checkpoint, as with one node"
