"""Classic mistakes of a reclaimer or a group writer, put back one at a time. Each must be caught.

A mutant that passed would mean that the exhaustive interleavings of the neighbouring files prove nothing about it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
from process_store import ProcessStore
from producer_world import World, append
from small_world import STEPS, audited, checkpoint, clean, grow, inside_everywhere
from stepfs.lake.floor import Floor
from stepfs.lake.reclaim.groups import GroupWatch
from test_groups_and_reclaim import (
    clean_beside,
    comes_too_early,
    follows_up,
    joins,
    lands_late_and_is_tried_again,
    rolls_back,
)
from test_reader_hazards import without_snapshots
from test_reclaim_kills import grown_and_littered

from stepfs.clock import Clock
from stepfs.errors import StepfsError
from stepfs.format.ids import Step, Version
from stepfs.format.keys import DataName
from stepfs.format.records import FloorRecord
from stepfs.format.snapshot import ProducerState
from stepfs.lake import group_sequence
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim import run as run_room
from stepfs.lake.reclaim import sweep as sweep_room
from stepfs.lake.reclaim.plan import GroupEvidence, Target
from stepfs.lake.reclaim.report import CountingRemover
from stepfs.lake.sequence import Mine, SlotOutcome

Mutate = Callable[[pytest.MonkeyPatch], None]


def no_second_look(patch: pytest.MonkeyPatch) -> None:
    """The reclaimer does not look at the groups again after its closing record."""

    def no_more(groups: Sequence[GroupEvidence], to: Step) -> bool:
        del groups, to
        return False

    patch.setattr(run_room, "holds_back", no_more)


def no_announcement(patch: pytest.MonkeyPatch) -> None:
    """The floor record says nothing of where it closes before it is too late."""
    append_record = run_room._append

    async def late(floor: Floor, record: FloorRecord) -> bool:
        return True if record.closing > record.first_live_step else await append_record(floor, record)

    patch.setattr(run_room, "_append", late)


def group_looks_once(patch: pytest.MonkeyPatch) -> None:
    """A group writer reads the floor before its record and not after."""

    class OneLook(Floor):
        looked = False

        async def refresh(self) -> bool:
            if self.looked:
                return False
            self.looked = True
            return await super().refresh()

    patch.setattr(group_sequence, "Floor", OneLook)


def on_record_is_enough(patch: pytest.MonkeyPatch) -> None:
    """What the group's newest record holds already counts as seen by every reclaimer."""

    async def nothing(floor: Floor, clock: Clock) -> SlotOutcome:
        del floor, clock
        return Mine()

    patch.setattr(Floor, "take_back", nothing)


def any_slot(patch: pytest.MonkeyPatch) -> None:
    """The advance goes into whatever slot is free, not directly after its own closing record."""
    take = Floor.append

    async def anywhere(floor: Floor, record: FloorRecord) -> SlotOutcome:
        await floor.refresh()
        return await take(floor, record)

    patch.setattr(Floor, "append", anywhere)


def deletes_first(patch: pytest.MonkeyPatch) -> None:
    """The data goes before the floor says so."""
    delete, advance = run_room._delete, run_room._advance

    async def hasty(
        reader: LogReader, target: Target, watch: GroupWatch, clock: Clock, grace_s: float
    ) -> bool:
        await delete(reader, target, CountingRemover(reader.store), orphans=False)
        return await advance(reader, target, watch, clock, grace_s)

    patch.setattr(run_room, "_advance", hasty)


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
    """One step more goes than the floor record says."""
    delete = run_room._delete

    async def greedy(reader: LogReader, target: Target, remover: CountingRemover, *, orphans: bool) -> None:
        further = replace(target, first_live=Step(target.first_live + 1))
        await delete(reader, further, remover, orphans=orphans)

    patch.setattr(run_room, "_delete", greedy)


def no_orphans(patch: pytest.MonkeyPatch) -> None:
    """Only what was committed and is dead goes; what crashed producers left stays for ever."""

    async def nothing(*_: object) -> None:
        """Looks at none, due or asked for."""

    patch.setattr(sweep_room, "_walk_orphans", nothing)


def reclaim_meets(change: Callable[..., Awaitable[None]]) -> int:
    return inside_everywhere(grow, clean_beside, partial(change, set()), follows_up)


def change_meets_reclaim(change: Callable[..., Awaitable[None]]) -> int:
    return inside_everywhere(grow, partial(change, set()), clean, follows_up)


def reclaim_meets_a_faster_one() -> int:
    async def further(world: World) -> None:
        await checkpoint(world, "run", STEPS - 1)
        await clean(world)

    return inside_everywhere(grown_and_littered, clean_beside, further, audited)


def producer_meets_reclaim() -> int:
    """A reclaim between the upload of a TGB and its commit, as between all else."""

    async def produces(world: World, store: ProcessStore) -> None:
        async with world.producer("a", store) as producer:
            await append(producer, 9)

    return inside_everywhere(grow, produces, clean, follows_up_after_one_more)


async def follows_up_after_one_more(world: World) -> None:
    assert world.ledger.published["a"] == 10


def one_reclaim(of: Callable[[World], Awaitable[None]]) -> int:
    return inside_everywhere(of, clean_beside, _nothing, audited)


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
    (no_second_look, "reclaim meets a rollback"),
    (no_second_look, "reclaim meets a new group"),
    (no_announcement, "reclaim meets a rollback"),
    (group_looks_once, "rollback meets a reclaim"),
    (group_looks_once, "first checkpoint meets a reclaim"),
    (group_looks_once, "new group meets a reclaim"),
    (on_record_is_enough, "reclaim meets a late record"),
    (any_slot, "reclaim meets a faster one"),
    (deletes_first, "one reclaim"),
    (no_snapshot, "one reclaim without snapshots"),
    (impatient_orphans, "producer meets a reclaim"),
    (by_record_not_by_floor, "one reclaim"),
    (no_orphans, "one reclaim"),
]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_scenarios_hold_without_a_mutant(name: str) -> None:
    assert SCENARIOS[name]() > 5


@pytest.mark.logs("were reclaimed before they were on record")  # what some of these mistakes lead to
@pytest.mark.parametrize(("mutate", "name"), MUTANTS, ids=[f"{m.__name__}: {n}" for m, n in MUTANTS])
def test_mutant_10_is_found(mutate: Mutate, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, StepfsError)):
        SCENARIOS[name]()
