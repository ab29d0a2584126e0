"""Classic mistakes of a reclaimer or a group writer, put back one at a time. Each must be caught.

A mutant that passed would mean that the exhaustive interleavings of the neighbouring files prove nothing about it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest
from process_store import ProcessStore
from producer_world import World, append
from small_world import STEPS, audited, checkpoint, clean, grow, inside_everywhere
from test_groups_and_reclaim import comes_too_early, follows_up, joins, lands_late_and_is_tried_again, rolls_back
from test_reader_hazards import without_snapshots
from test_reclaim_kills import grown_and_littered

from stepfs.errors import StepfsError
from stepfs.format.control import ControlRecord
from stepfs.format.ids import Step, Version
from stepfs.format.keys import DataName
from stepfs.format.snapshot import ProducerState
from stepfs.lake import decisions as decisions_room
from stepfs.lake.control import Control
from stepfs.lake.decisions import Advance, Request, decide
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim import run as run_room
from stepfs.lake.reclaim import sweep as sweep_room
from stepfs.lake.reclaim.run import CountingRemover
from stepfs.lake.reclaim.sweep import Do, LastDead, Target, walk_doomed

Mutate = Callable[[pytest.MonkeyPatch], None]


def no_compare(patch: pytest.MonkeyPatch) -> None:
    """The advance goes into whatever slot is free, and takes the groups along that it knew."""

    async def anywhere(control: Control, request: Advance) -> bool:
        known = control.record
        await control.refresh()
        record = replace(control.record, groups=known.groups, first_live_step=request.first_live, floor=request.floor)
        return await control._take(control.number + 1, record)

    patch.setattr(Control, "advance", anywhere)


def groups_unseen(patch: pytest.MonkeyPatch) -> None:
    """The advance is decided again on the newest record, as if only its floor were at stake."""

    async def again(control: Control, request: Advance) -> bool:
        await control.refresh()
        record = replace(control.record, first_live_step=request.first_live, floor=request.floor)
        return await control._take(control.number + 1, record)

    patch.setattr(Control, "advance", again)


def decided_once(patch: pytest.MonkeyPatch) -> None:
    """A group writer that loses its slot sends what it has decided to the next one."""

    async def stubborn(control: Control, request: Request) -> ControlRecord:
        await control.refresh()
        decided = decide(control.number, control.record, request)
        while decided is not None and not await control._take(control.number + 1, decided):
            await control.refresh()
        return control.record

    patch.setattr(Control, "change", stubborn)


def late_steps_are_taken(patch: pytest.MonkeyPatch) -> None:
    """What is reclaimed is recorded like everything else."""

    def nothing(*_: object) -> None:
        """No refusal."""

    patch.setattr(decisions_room, "_check", nothing)


def deletes_first(patch: pytest.MonkeyPatch) -> None:
    """The data goes before the floor says so."""
    prepared = run_room._prepared

    async def hasty(reader: LogReader, target: Target) -> Advance:
        await walk_doomed(reader, target, CountingRemover(reader.store).remove)
        return await prepared(reader, target)

    patch.setattr(run_room, "_prepared", hasty)


def no_snapshot(patch: pytest.MonkeyPatch) -> None:
    """The floor is raised without making sure that anybody can still start from somewhere."""

    async def hope(reader: LogReader, lowest: Version) -> Version:
        del reader
        return lowest

    patch.setattr(run_room, "ensure_snapshots", hope)


def impatient_orphans(patch: pytest.MonkeyPatch) -> None:
    """Whatever no commit names is an orphan, although its producer may be about to commit it."""

    def never(name: DataName, producer: ProducerState | None, *, sealed: bool) -> bool:
        del name, producer, sealed
        return True

    patch.setattr(sweep_room, "can_never_be_committed", never)


def by_record_not_by_floor(patch: pytest.MonkeyPatch) -> None:
    """One step more goes than the control record says."""

    async def greedy(reader: LogReader, target: Target, do: Do) -> LastDead:
        return await walk_doomed(reader, replace(target, first_live=Step(target.first_live + 1)), do)

    patch.setattr(run_room, "walk_doomed", greedy)


def no_orphans(patch: pytest.MonkeyPatch) -> None:
    """Only what was committed and is dead goes; what crashed producers left stays for ever."""

    async def nothing(*_: object, **__: object) -> None:
        """Looks at none, due or asked for."""

    patch.setattr(run_room, "walk_orphans", nothing)


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
