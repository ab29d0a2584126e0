"""The hazards of COMMIT.md that concern a slot and its answers, each met on purpose; and mutants that must be caught.

A mutant puts one classic mistake back. If its run still passed, the scenario would prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import trio
from doubles.faults import (
    CONFLICT_409,
    ERROR_500,
    ERROR_500_APPLIED,
    FALSE_412,
    LOST_REQUEST,
    LOST_RESPONSE,
    OWN_412,
    RESET_AFTER,
    RESET_BEFORE,
    Fault,
    Scripted,
    delayed,
)
from producer_world import World, append, caught, feed, reclaim_below, simulate

from stepfs.format.commit import Commit
from stepfs.format.snapshot import LogState
from stepfs.lake.log.reader import LogReader
from stepfs.lake.slots import Mine, SlotLost, SlotOutcome
from stepfs.store.api import Put, Store
from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit.loop import CommitStats
from stepfs_producer.commit.rebase import Durable, Incarnation, Refusal, Stamp, rebase
from stepfs_producer.commit.uploads import CommitWindow


def forgetful_rebase(head: LogState, pending: Sequence[Durable], me: Incarnation, stamp: Stamp) -> Commit | Refusal:
    """A writer without the guard by seq: whatever is pending is new."""
    known = head.producers[me.producer_id]
    fresh = [replace(item, tgb=replace(item.tgb, seq=known.next_seq + number)) for number, item in enumerate(pending)]
    return rebase(head, fresh, me, stamp)


async def trusting_take_slot(store: Store, key: str, body: bytes) -> SlotOutcome:
    """A writer that believes the first answer: anything but success is a conflict."""
    return Mine() if await store.create(key, body) is Put.CREATED else SlotLost(taken=True)


async def hazard_01(world: World, faults: Sequence[Fault]) -> None:
    """A producer sleeps while the slots after its head are filled by others, consumed, and deleted."""
    sleeper_store = world.store("sleeper")
    async with world.producer("sleeper", sleeper_store) as sleeper:
        await append(sleeper, 0)
        await sleeper.flush()
        async with world.producer("busy") as busy:
            for number in range(20):
                await append(busy, number)
                await busy.flush()
                if number == 9:
                    await reclaim_below(world, 5)  # the floor rises once a second snapshot stands above it
        await reclaim_below(world, 15)
        sleeper_store.plan = Scripted([("create", "log/", fault) for fault in faults])
        await append(sleeper, 1)
        await sleeper.flush()
        assert sleeper.tally.lost == 1
    assert world.ledger.counts["zombie slots"] == 1, "the sleeper did take a deleted slot"
    world.check(sleeper=2, busy=20)


@pytest.mark.parametrize("faults", [[], [LOST_RESPONSE], [OWN_412], [ERROR_500_APPLIED], [LOST_REQUEST, RESET_AFTER]])
def test_hazard_01_slot_resurrection(faults: list[Fault]) -> None:
    """Including: the create lands, the reply is lost, the GET says mine, and the floor has passed."""
    simulate(lambda world: hazard_01(world, faults))


@pytest.mark.parametrize("faults", [[], [LOST_RESPONSE]])
def test_hazard_01_mutant_without_the_floor_check(faults, monkeypatch):
    async def trust(reader: LogReader, *, lenient: bool = False) -> bool:
        del lenient
        reader.state = reader.head
        return True

    async def scenario(world: World) -> None:
        world.store("warm-up")
        monkeypatch.setattr(LogReader, "confirm", trust)
        await hazard_01(world, faults)

    with caught():
        simulate(scenario)


async def hazard_01_undecided(world: World, first: Fault) -> None:
    """The producer's create is not decided while others fill, consume and delete its slot and those behind it; then it sends
    the same bytes to the same slot again."""
    store = world.store("sleeper")
    async with world.producer("sleeper", store) as sleeper:
        await append(sleeper, 0)
        await sleeper.flush()
        store.plan = away_between(trio.current_time(), trio.current_time() + 60.0, first)
        await append(sleeper, 1)
        await trio.sleep(20.0)
        async with world.producer("busy") as busy:
            for number in range(20):
                await append(busy, number)
                await busy.flush()
                if number == 9:
                    await reclaim_below(world, 5)
        await reclaim_below(world, 15)
        assert trio.current_time() < 60.0, "all that happened while nobody answered the sleeper"
        await sleeper.flush()
        assert (sleeper.tally.undecided > 0, sleeper.tally.lost) == (True, 1)
        assert world.ledger.published["sleeper"] == 2, "what `flush` returned is in the log"
    assert world.ledger.counts["zombie slots"] == 1, "the sleeper did take a deleted slot"
    world.check(sleeper=2, busy=20)


@pytest.mark.logs("trying on for")
@pytest.mark.parametrize("first", [LOST_REQUEST, LOST_RESPONSE], ids=["never landed", "landed at once"])
def test_hazard_01_after_an_undecided_create(first: Fault) -> None:
    simulate(lambda world: hazard_01_undecided(world, first))


def undecided_is_believed(patch: pytest.MonkeyPatch) -> None:
    """A create that was undecided and then has an answer needs no look at the floor."""
    committer = commit_loop.Committer
    take, settle = committer._take, committer._settle_mine
    undecided: list[commit_loop._Attempt] = []

    async def noted(self: commit_loop.Committer, attempt: commit_loop._Attempt) -> commit_loop.CommitOutcome:
        outcome = await take(self, attempt)
        if isinstance(outcome, commit_loop.Undecided):
            undecided.append(attempt)
        return outcome

    async def believed(
        self: commit_loop.Committer, attempt: commit_loop._Attempt
    ) -> commit_loop.Committed | commit_loop.CommitLost:
        if attempt not in undecided:
            return await settle(self, attempt)
        self._unresolved, before = None, self.head
        self.reader.extend(attempt.commit, attempt.body)
        return commit_loop.Committed(attempt.commit, before, self.head)

    patch.setattr(committer, "_take", noted)
    patch.setattr(committer, "_settle_mine", believed)


@pytest.mark.logs("trying on for")
def test_hazard_01_mutant_that_believes_an_undecided_create(monkeypatch: pytest.MonkeyPatch) -> None:
    undecided_is_believed(monkeypatch)
    with caught():
        simulate(lambda world: hazard_01_undecided(world, LOST_REQUEST))


async def one_commit(world: World, script: Sequence[tuple[str, str, Fault]]) -> CommitStats:
    plan = Scripted([])
    store = world.store("p", plan)
    async with world.producer("p", store) as producer:
        plan.left = list(script)
        await feed(producer, 3)
        await producer.flush()
        await feed(producer, 5)
    assert not plan.left, "every fault happened"
    await world.settle()
    world.check(p=5)
    return producer.tally


@pytest.mark.parametrize("fault", [OWN_412, LOST_RESPONSE, RESET_AFTER, ERROR_500_APPLIED])
def test_hazard_02_own_success_read_as_conflict(fault: Fault) -> None:
    tally = simulate(lambda world: one_commit(world, [("create", "log/", fault)]))
    assert tally.lost == 0


@pytest.mark.parametrize("fault", [OWN_412, RESET_AFTER])
def test_hazard_02_is_caught_by_the_guard_as_well(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a writer that takes its own success for a conflict drops what its head shows as committed."""
    monkeypatch.setattr(commit_loop, "take_slot", trusting_take_slot)
    tally = simulate(lambda world: one_commit(world, [("create", "log/", fault)]))
    assert tally.lost == 1


def test_hazard_02_mutant_without_reading_the_slot_and_without_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_loop, "take_slot", trusting_take_slot)
    monkeypatch.setattr(commit_loop, "rebase", forgetful_rebase)
    with caught():
        simulate(lambda world: one_commit(world, [("create", "log/", RESET_AFTER)]))


@pytest.mark.parametrize("fault", [CONFLICT_409, ERROR_500, RESET_BEFORE, LOST_REQUEST])
def test_hazard_03_409_is_retried_in_the_same_slot(fault: Fault) -> None:
    tally = simulate(lambda world: one_commit(world, [("create", "log/", fault)] * 3))
    assert (tally.lost, tally.undecided) == (0, 0)


def test_hazard_03_a_412_for_a_free_slot_is_followed_by_a_fresh_look() -> None:
    tally = simulate(lambda world: one_commit(world, [("create", "log/", FALSE_412)]))
    assert tally.lost == 1


def test_hazard_03_mutant_that_takes_a_409_for_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_loop, "take_slot", trusting_take_slot)
    tally = simulate(lambda world: one_commit(world, [("create", "log/", CONFLICT_409)]))
    assert tally.lost > 0, "the count in test_hazard_03 finds it"


def away_between(start_s: float, end_s: float, first: Fault):
    """The first commit meets `first`; from then until `end_s` nothing else is answered."""
    script = Scripted([("create", "log/", first)])

    def plan(verb: str, key: str, rng: object) -> Fault | None:
        now_s = trio.current_time()
        if now_s < start_s:
            return None
        if script.left:
            return script(verb, key, rng)  # type: ignore[arg-type]
        return RESET_BEFORE if now_s < end_s and verb != "put" else None

    return plan


async def hazard_05(world: World) -> None:
    """{0, 1} is sent, the store falls silent, {0 … 3} is pending when {0, 1} lands late."""
    store = world.store("p", away_between(10.0, 60.0, delayed(20.0)))
    async with world.producer("p", store) as producer:
        await trio.sleep_until(20.0)
        for number in range(2):
            await append(producer, number)
        await trio.sleep_until(30.0)
        for number in range(2, 4):
            await append(producer, number)
        await producer.flush()
        assert producer.tally.undecided > 0
    await world.settle()
    assert world.ledger.counts["landed late"] == 1
    world.check(p=4)


@pytest.mark.logs("trying on for")
def test_hazard_05_pending_grew_after_unknown() -> None:
    simulate(hazard_05)


@pytest.mark.logs("trying on for")
def test_hazard_05_mutant_that_clears_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = CommitWindow.committed_below

    def clear(pending: CommitWindow, next_seq: int) -> int:
        return drop(pending, max(next_seq, pending.first_seq + pending.ready_tgbs))

    monkeypatch.setattr(CommitWindow, "committed_below", clear)
    with caught():
        simulate(hazard_05)


@pytest.mark.logs("trying on for")
def test_hazard_05_mutant_that_forgets_what_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    take = commit_loop.Committer._take

    async def forget(self: commit_loop.Committer, attempt: commit_loop._Attempt) -> commit_loop.SlotOutcome:  # type: ignore[name-defined]
        outcome = await take(self, attempt)
        self._unresolved = None
        return outcome

    monkeypatch.setattr(commit_loop.Committer, "_take", forget)
    monkeypatch.setattr(commit_loop, "rebase", forgetful_rebase)
    with caught():
        simulate(hazard_05)
