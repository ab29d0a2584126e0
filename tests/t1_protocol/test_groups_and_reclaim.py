"""Hazard 10: groups change while a reclaim runs; and mutants that must be caught."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count, takewhile
from typing import Any

import pytest
import trio
from doubles.trio_clock import TrioClock
from mutants import (
    by_record_not_by_floor,
    decided_once,
    deletes_first,
    groups_unseen,
    impatient_orphans,
    late_steps_are_taken,
    no_compare,
    no_orphans,
    no_snapshot,
)
from process_store import ProcessStore
from producer_world import World, append, feed
from scenarios import scenario
from small_world import (
    NEED,
    STEPS,
    audited,
    checkpoint,
    clean,
    group,
    grow,
    grown_and_littered,
    inside_everywhere,
    lands_late,
    process,
    register,
    small,
    without_snapshots,
)

from stepfs.errors import RefusedError, StepfsError, WithdrawnError
from stepfs.format.ids import Step
from stepfs.lake.decisions import Add
from stepfs.lake.reclaim.run import Reclaimer

Outcomes = set[str]


async def rolls_back(outcomes: Outcomes, world: World, store: ProcessStore | None = None) -> None:
    """The group brings back a checkpoint from before the one it last registered."""
    try:
        await checkpoint(world, "run", 3, store, keep=None)
    except WithdrawnError:
        outcomes.add("withdrawn")
        record = await group(world, "run").read()
        assert record is not None
        assert record.kept == (NEED,), "nothing was written"
    else:
        outcomes.add("kept")


async def joins(outcomes: Outcomes, world: World, store: ProcessStore | None = None) -> None:
    """A second group appears; it is promised whatever it is told."""
    await register(world, "late", store)
    outcomes.add(f"from {world.ledger.promises['late']}")


async def comes_too_early(outcomes: Outcomes, world: World, store: ProcessStore | None = None) -> None:
    """A group is created by a checkpoint that others have long passed."""
    try:
        await checkpoint(world, "late", 3, store, keep=None)
    except WithdrawnError:
        outcomes.add("withdrawn")
        assert await group(world, "late").read() is None, "a group that was refused holds nothing back"
    else:
        outcomes.add("kept")


async def leaves(outcomes: Outcomes, world: World, store: ProcessStore | None = None) -> None:
    """The only group retires: nothing says any more what may go."""
    world.ledger.release("run")
    await group(world, "run", store).retire()
    outcomes.add("retired")


async def follows_up(world: World) -> None:
    """Everybody who is left moves to the end; then nothing but the end is left."""
    await clean(world)
    for name in list(world.ledger.promises):
        await checkpoint(world, name, STEPS - 1)
    await clean(world)
    await audited(world)


_BOTH = {"withdrawn", "kept"}
every_change = pytest.mark.parametrize(
    ("change", "expected"),
    [(rolls_back, _BOTH), (comes_too_early, _BOTH), (joins, {"from 0", f"from {NEED}"}), (leaves, {"retired"})],
)


@every_change
def test_hazard_10_a_group_changes_inside_every_await_of_a_reclaim(change, expected: Outcomes):
    outcomes: Outcomes = set()
    assert inside_everywhere(grow, clean, partial(change, outcomes), follows_up) > 50
    assert outcomes == expected, "both sides of the race were seen"


@every_change
def test_hazard_10_a_reclaim_inside_every_await_of_a_group_change(change, expected: Outcomes):
    outcomes: Outcomes = set()
    assert inside_everywhere(grow, partial(change, outcomes), clean, follows_up) == 8, "LIST, GET, GET, create"
    assert outcomes == expected


def test_hazard_10_two_nodes_of_one_group_change_it_and_a_reclaim_comes_between() -> None:
    """Node A brings back an old checkpoint, a reclaim passes it, node B builds on A's record before A has looked."""

    async def one(reclaim_at: int, other_at: int, world: World) -> bool:
        store = process(world, "node A")

        async def other() -> None:
            await group(world, "run", process(world, "node B")).add(Step(NEED + 2))

        async def passes() -> None:
            await clean(world)

        store.inside = {reclaim_at: passes, other_at: other}
        outcomes: Outcomes = set()
        try:
            await checkpoint(world, "run", 3, store, keep=None)
        except WithdrawnError:
            outcomes.add("withdrawn")
        if store.inside:
            return False
        record = await group(world, "run").read()
        assert record is not None
        assert NEED + 2 in record.kept, "what node B was told stands"
        assert (3 in record.kept) is ("withdrawn" not in outcomes), "and so does what node A was told"
        assert record.need >= world.ledger.first_live_step
        await follows_up(world)
        return True

    pairs = 0
    for reclaim_at in count(1):
        reached = sum(
            1 for _ in takewhile(bool, (small(partial(one, reclaim_at, k), on=grow) for k in count(reclaim_at + 1)))
        )
        if not reached:
            break
        pairs += reached
    assert pairs >= 50


@scenario(small, on=grow)
async def test_a_retired_group_does_not_count_and_without_groups_nothing_goes(world: World) -> None:
    await register(world, "other")
    assert (await clean(world)).first_live_step == 0
    await leaves(set(), world)
    assert (await clean(world)).first_live_step == 0
    world.ledger.release("other")
    await group(world, "other").retire()
    report = await clean(world)
    assert (report.first_live_step, report.deleted_objects) == (0, 0)
    assert "no group" in report.reason
    await checkpoint(world, "third", NEED)
    assert (await clean(world)).first_live_step == NEED
    await audited(world)


def test_a_checkpoint_beyond_the_log_is_refused_unless_the_log_was_read_too_early() -> None:
    async def is_refused(world: World) -> None:
        await checkpoint(world, "run", STEPS + 1)
        with pytest.raises(RefusedError, match="another lake"):
            await clean(world)

    async def overtakes(world: World) -> None:
        async with world.producer("a") as producer:
            await feed(producer, 14)
        await checkpoint(world, "run", len(world.ledger.steps))

    async def done(world: World) -> None:
        await clean(world)
        assert world.ledger.first_live_step == len(world.ledger.steps)

    small(is_refused, on=grow)
    inside_everywhere(grow, clean, overtakes, done)


@scenario(small, on=grow)
async def test_a_checkpoint_that_is_gone_is_never_acknowledged_however_often_it_is_tried(world: World):
    await clean(world)
    before = dict(world.shared.objects)
    for _ in range(3):
        with pytest.raises(WithdrawnError, match="steps from 2 on are needed") as caught:
            await group(world, "run").add(Step(2))
        assert caught.value.late == {2}
    assert world.shared.objects == before, "what is refused leaves nothing behind"
    await audited(world)


async def lands_late_and_is_tried_again(outcomes: Outcomes, world: World, store: ProcessStore | None = None) -> None:
    """A node went back to step 3 and died; its record lands only now, and the node that restarts tries once more."""
    outcomes.add("landed" if await lands_late(world, Add("run", Step(3))) else "lost")
    try:
        await checkpoint(world, "run", 3, store, keep=None)
    except WithdrawnError:
        outcomes.add("withdrawn")
    else:
        outcomes.add("kept")


def test_hazard_10_a_record_that_lands_unseen_protects_or_does_not_land() -> None:
    outcomes: Outcomes = set()
    assert inside_everywhere(grow, clean, partial(lands_late_and_is_tried_again, outcomes), follows_up) > 50
    assert outcomes == _BOTH | {"landed", "lost"}


class SlowSnapshots(ProcessStore):
    """A reclaimer with a long way: each snapshot takes it five seconds."""

    async def get(self, key: str, **options: Any) -> bytes | None:
        if "/snapshot/" in key:
            await trio.sleep(5.0)
        return await super().get(key, **options)


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
@scenario(small, on=grow)
async def test_a_reclaim_that_takes_longer_than_groups_rest_gives_up_what_it_found(world: World, grace_s: float):
    """A group changes every two seconds and needs nothing below: the advance is decided again on the newer record."""
    await trio.sleep(3600.0)
    slow = SlowSnapshots(world.shared, actor="slow")
    reclaimer = Reclaimer(slow, world.identity, clock=TrioClock(), grace_s=grace_s)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _changes() -> None:
            for _ in range(1000):  # one is recorded, and dropped again
                await group(world, "run").revise(lambda kept: kept ^ {Step(NEED + 1)})
                await trio.sleep(2.0)

        with trio.fail_after(60.0):
            assert (await reclaimer.run()).first_live_step == NEED
        nursery.cancel_scope.cancel()
    assert slow.counts.requests < 100


@scenario(small, on=grow)
async def test_an_advance_gives_up_nothing_that_a_group_needed_since_its_decision(world: World) -> None:
    """Within the grace also what no group needs any more."""
    slow = SlowSnapshots(world.shared, actor="slow")
    reclaimer = Reclaimer(slow, world.identity, clock=TrioClock(), grace_s=60.0)
    await trio.sleep(3600.0)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _changes() -> None:
            await trio.sleep(6.0)
            await group(world, "run").add(Step(3))
            await group(world, "run").drop(Step(3))

        assert (await reclaimer.run()).first_live_step <= 3
    await trio.sleep(61.0)
    assert (await reclaimer.run()).first_live_step == NEED


Mutate = Callable[[pytest.MonkeyPatch], None]


def reclaim_meets(change: Callable[..., Awaitable[None]]) -> int:
    return inside_everywhere(grow, clean, partial(change, set()), follows_up)


def change_meets_reclaim(change: Callable[..., Awaitable[None]]) -> int:
    return inside_everywhere(grow, partial(change, set()), clean, follows_up)


def reclaim_meets_a_faster_one() -> int:
    async def further(world: World) -> None:
        await checkpoint(world, "run", STEPS - 1)
        await clean(world)

    return inside_everywhere(grown_and_littered, clean, further, audited)


def producer_meets_reclaim() -> int:
    """A reclaim between the upload of a TGB and its commit, as between all else."""

    async def produces(world: World, store: ProcessStore) -> None:
        async with world.producer("a", store) as producer:
            await append(producer, 9)

    return inside_everywhere(grow, produces, clean, follows_up_after_one_more)


async def follows_up_after_one_more(world: World) -> None:
    assert world.ledger.published["a"] == 10


def one_reclaim(of: Callable[[World], Awaitable[None]]) -> int:
    return inside_everywhere(of, clean, _nothing, audited)


async def _nothing(world: World) -> None:
    del world


SCENARIOS = {
    "reclaim meets a rollback": partial(reclaim_meets, rolls_back),
    "reclaim meets a new group": partial(reclaim_meets, joins),
    "reclaim meets a late record": partial(reclaim_meets, lands_late_and_is_tried_again),
    "rollback meets a reclaim": partial(change_meets_reclaim, rolls_back),
    "first checkpoint meets a reclaim": partial(change_meets_reclaim, comes_too_early),
    "new group meets a reclaim": partial(change_meets_reclaim, joins),
    "reclaim meets a faster one": reclaim_meets_a_faster_one,
    "producer meets a reclaim": producer_meets_reclaim,
    "one reclaim": partial(one_reclaim, grown_and_littered),
    "one reclaim without snapshots": partial(one_reclaim, without_snapshots),
}
MUTANTS: list[tuple[Mutate, str]] = [
    (no_compare, "reclaim meets a rollback"), (no_compare, "reclaim meets a new group"),
    (groups_unseen, "reclaim meets a rollback"), (groups_unseen, "reclaim meets a late record"),
    (groups_unseen, "reclaim meets a faster one"), (decided_once, "rollback meets a reclaim"),
    (decided_once, "first checkpoint meets a reclaim"), (decided_once, "new group meets a reclaim"),
    (late_steps_are_taken, "rollback meets a reclaim"), (deletes_first, "one reclaim"),
    (no_snapshot, "one reclaim without snapshots"), (impatient_orphans, "producer meets a reclaim"),
    (by_record_not_by_floor, "one reclaim"), (no_orphans, "one reclaim"),
]  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_scenarios_hold_without_a_mutant(name: str) -> None:
    assert SCENARIOS[name]() > 5


@pytest.mark.parametrize(("mutate", "name"), MUTANTS, ids=[f"{m.__name__}: {n}" for m, n in MUTANTS])
def test_mutant_10_is_found(mutate: Mutate, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, StepfsError)):
        SCENARIOS[name]()
