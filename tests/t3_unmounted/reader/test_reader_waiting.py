"""Waiting for steps without a mount: the same steps, the same deadlines, an exception where a mount has an errno."""

from __future__ import annotations

import math

import pytest
import trio
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from lakework import list_groups
from shelf import SMALL, Shelf, outcome_of

from stepfs.errors import (
    AbsentError,
    NoSuchStepError,
    ReclaimedError,
    RefusedError,
    StepfsError,
    StoreUnreachableError,
    WaitExpiredError,
)
from stepfs.format.ids import Step
from stepfs.format.keys import log_prefix, numbered
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake


async def test_what_is_not_committed_is_not_there_at_once(autojump_clock):
    shelf = await Shelf.of(SMALL)
    async with shelf.reader() as reader:
        began = trio.current_time()
        error = await outcome_of(shelf.read, reader, 1, 0)
        assert isinstance(error, NoSuchStepError)
        assert isinstance(error, IndexError)
        assert isinstance(error, AbsentError)
        assert "1 steps are" in str(error)
        assert trio.current_time() - began < 0.1


async def test_with_wait_a_step_is_waited_for_and_absent_when_that_expires(autojump_clock):
    shelf = await Shelf.create()
    async with shelf.reader(wait_s=7.0) as reader, trio.open_nursery() as nursery:
        began = trio.current_time()
        error = await outcome_of(shelf.read, reader, 0, 0)
        assert isinstance(error, NoSuchStepError)
        assert "within 7 s" in str(error)
        assert trio.current_time() - began == pytest.approx(7.0, abs=0.5)

        async def commit_later() -> None:
            await trio.sleep(3.0)
            await shelf.commit(SMALL)

        await trio.sleep(2)  # a deadline outlives its last waiter by a second
        nursery.start_soon(commit_later)
        assert await shelf.read(reader, 0, 1) == shelf.expected(0, 1)


async def test_steps_to_come_are_waited_for_under_steps_until_the_deadline(autojump_clock):
    shelf = await Shelf.of(SMALL)
    async with shelf.reader(steps=range(1, 3), deadline_s=20.0) as reader:
        assert list(reader.tree.listed()) == [1, 2]
        error = await outcome_of(shelf.read, reader, 0, 0)
        assert isinstance(error, NoSuchStepError)
        assert "outside" in str(error)
        began = trio.current_time()
        error = await outcome_of(shelf.read, reader, 1, 0)
        assert isinstance(error, WaitExpiredError)
        assert isinstance(error, TimeoutError)
        assert isinstance(error, StepfsError)
        assert trio.current_time() - began == pytest.approx(20.0, abs=0.5)


async def test_following_waits_whatever_the_options_say(autojump_clock):
    shelf = await Shelf.create()
    async with shelf.reader(poll_s=1.0) as reader, trio.open_nursery() as nursery:
        nursery.start_soon(shelf.commit, SMALL)
        assert await reader.wait_for(Step(0), waits=True)
        error = await outcome_of(reader.wait_for, Step(0), waits=False)
        assert error is True
        began = trio.current_time()
        assert isinstance(await outcome_of(reader.wait_for, Step(1), waits=True), WaitExpiredError)
        assert trio.current_time() - began == pytest.approx(300.0, abs=1)


@pytest.mark.logs("cannot follow the lake")
async def test_a_lake_that_cannot_be_followed_is_the_reason_that_is_named(autojump_clock):
    shelf = await Shelf.of(SMALL)
    async with shelf.reader(deadline_s=20.0) as reader:
        damaged = numbered(log_prefix(shelf.identity.lake_id), (await shelf.log()).state.version + 1)
        await FaultyStore(shelf.shared).put(damaged, [b"garbage"])
        error = await outcome_of(reader.wait_for, Step(1), waits=True)
        assert isinstance(error, WaitExpiredError)
        assert "not seen within 20 s: the lake cannot be followed" in str(error)
        assert damaged in str(error)


async def test_without_a_deadline_following_waits_for_ever(autojump_clock):
    shelf = await Shelf.create()
    async with shelf.reader(deadline_s=math.inf, poll_s=2.0) as reader:
        with trio.move_on_after(400) as scope:
            await reader.wait_for(Step(0), waits=True)
        assert scope.cancelled_caught


async def test_a_sealed_lake_ends_every_wait_at_once(autojump_clock):
    shelf = await Shelf.of(SMALL, SMALL)
    async with shelf.reader(wait_s=100.0) as reader, trio.open_nursery() as nursery:
        ended = []

        async def follow() -> None:
            ended.append((await reader.wait_for(Step(2), waits=True), trio.current_time()))

        async def read() -> None:
            ended.append((await outcome_of(shelf.read, reader, 2, 0), trio.current_time()))

        nursery.start_soon(follow)
        nursery.start_soon(read)
        await trio.sleep(5)
        await shelf.seal()
        await trio.sleep(3)
        assert all(at < 9 for _, at in ended)
        by_kind = {type(found): found for found, _ in ended}
        assert by_kind[bool] is False
        assert "sealed" in str(by_kind[NoSuchStepError])
        assert await reader.wait_for(Step(1), waits=True)  # what is committed stays
        assert await reader.wait_for(Step(7), waits=True) is False


async def test_steps_beyond_the_end_of_a_sealed_lake_are_refused(autojump_clock):
    shelf = await Shelf.of(SMALL)
    await shelf.seal()
    with pytest.raises(RefusedError, match="sealed and has 1 steps"):
        async with shelf.reader(steps=range(5)):
            pass
    async with shelf.reader(steps=range(1)) as reader:
        assert await reader.wait_for(Step(0), waits=True)
        assert not await reader.wait_for(Step(1), waits=True)


async def test_following_a_view_of_some_steps_ends_with_them(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 4)
    async with shelf.reader(steps=range(1, 3)) as reader:
        found = [await reader.wait_for(Step(step), waits=True) for step in (1, 2, 3)]
        assert found == [True, True, False]
        assert isinstance(await outcome_of(reader.wait_for, Step(0), waits=True), NoSuchStepError)


async def test_reclaimed_steps_are_an_error_and_never_skipped(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    await shelf.checkpoint("train", 4)
    await shelf.reclaim()
    async with shelf.reader() as reader:
        for waits in (False, True):
            error = await outcome_of(reader.wait_for, Step(3), waits=waits)
            assert isinstance(error, ReclaimedError)
            assert "begins at step 4" in str(error)
        assert await shelf.read(reader, 4, 0) == shelf.expected(4, 0)
        assert list(reader.tree.listed()) == [4, 5]


async def test_steps_reclaimed_under_a_reader_leave_it(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    async with shelf.reader() as reader:
        assert await shelf.read(reader, 1, 0) == shelf.expected(1, 0)
        await shelf.checkpoint("train", 4)
        await shelf.reclaim()
        await shelf.commit(SMALL)
        await trio.sleep(3)
        assert isinstance(await outcome_of(shelf.read, reader, 1, 0), ReclaimedError)


async def test_steps_reclaimed_under_a_reader_of_a_quiet_lake_leave_it_within_100_s(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    async with shelf.reader() as reader:
        await trio.sleep(20)
        await shelf.checkpoint("train", 4)
        await shelf.reclaim()
        await trio.sleep(100.5)
        assert list(reader.tree.listed()) == [4, 5]


async def test_a_group_is_registered_and_keeps_what_its_reader_needs(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    await shelf.checkpoint("other", 5)
    async with shelf.reader(group="mine") as reader:
        await shelf.reclaim()
        await trio.sleep(3)
        assert await shelf.read(reader, 0, 0) == shelf.expected(0, 0)
        await shelf.checkpoint("mine", 3)  # a checkpoint anywhere moves the view here
        await trio.sleep(3)
        error = await outcome_of(shelf.read, reader, 2, 0)
        assert isinstance(error, ReclaimedError)
        assert "'mine' needs nothing below step 3" in str(error)
        await shelf.reclaim()
        assert await shelf.read(reader, 3, 0) == shelf.expected(3, 0)
        assert not [key for key in shelf.shared.objects if "/nodes/" in key], "it is not in the fleet view"


async def test_of_a_loader_with_a_group_its_workers_ask_nothing_for_it(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    async with shelf.reader(group="mine", workers=2) as reader:
        assert await shelf.read(reader, 0, 0) == shelf.expected(0, 0)
        await trio.sleep(30)
    assert await list_groups(FaultyStore(shelf.shared), shelf.identity) == {}


async def test_how_far_a_group_has_read_is_on_record_when_its_reader_ends(autojump_clock):
    shelf = await Shelf.of(*[SMALL] * 6)
    async with shelf.reader(group="mine") as reader:
        await shelf.read(reader, 4, 0)
    record = await Group.of(FaultyStore(shelf.shared), shelf.identity, "mine").read()
    assert record is not None
    assert record.opened == 5


@pytest.mark.logs("cannot follow the lake", "the store answers again")
async def test_a_lake_recreated_under_the_url_ends_the_reader(autojump_clock):
    shelf = await Shelf.of(SMALL)

    async def run() -> None:
        async with shelf.reader(wait_s=500.0) as reader:
            shelf.shared.objects.clear()
            shelf.shared._keys.clear()
            await create_lake(FaultyStore(shelf.shared), slices=2, clock=TrioClock())
            await reader.wait_for(Step(1), waits=True)

    with pytest.raises(BaseExceptionGroup) as caught:
        await run()
    assert caught.group_contains(RefusedError, match="was replaced")


async def test_a_read_says_at_once_that_the_lake_was_replaced_or_is_gone(autojump_clock):
    shelf = await Shelf.of(SMALL)
    async with shelf.reader() as reader:
        shelf.shared.objects.clear()
        shelf.shared._keys.clear()
        error = await outcome_of(shelf.read, reader, 0, 0)
        assert isinstance(error, AbsentError)
        assert "no lake" in str(error)
        await create_lake(FaultyStore(shelf.shared), slices=2, clock=TrioClock())
        error = await outcome_of(shelf.read, reader, 0, 0)
        assert isinstance(error, RefusedError)
        assert "was replaced" in str(error)


async def test_a_store_that_does_not_deliver_is_an_error_after_the_deadline(autojump_clock):
    class Mute(FaultyStore):
        async def read_into(self, *args, **options):
            await trio.sleep_forever()

    shelf = await Shelf.of(SMALL)
    async with shelf.reader(deadline_s=10.0, store=Mute(shelf.shared, actor="reader")) as reader:
        began = trio.current_time()
        assert isinstance(await outcome_of(shelf.read, reader, 0, 0), StoreUnreachableError)
        assert trio.current_time() - began == pytest.approx(10.0, abs=1)
