"""Classic mistakes of a reclaimer or a group writer, put back one at a time. Each must be caught.

A mutant that passed would mean that the exhaustive interleavings of the neighbouring files prove nothing about it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial

import pytest
from process_store import ProcessStore
from producer_world import World, append
from small_world import STEPS, audited, checkpoint, clean, grow, inside_everywhere
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

from stepfs import consumers
from stepfs.clock import Clock
from stepfs.errors import StepfsError
from stepfs.floor import Floor
from stepfs.format.ids import Step, Version
from stepfs.format.records import ConsumerRecord, FloorRecord, LakeIdentity
from stepfs.format.snapshot import LogState
from stepfs.log.reader import LogReader
from stepfs.reclaim import run as run_room
from stepfs.reclaim.plan import Need, Sorted, sort_objects
from stepfs.reclaim.run import Report
from stepfs.sequence import Mine, Outcome
from stepfs.store.api import Entry, Store

Mutate = Callable[[pytest.MonkeyPatch], None]


def no_second_look(patch: pytest.MonkeyPatch) -> None:
    """The reclaimer does not list the groups again after its closing record."""
    advance, look = run_room._advance, run_room.list_groups
    advancing = ContextVar("advancing", default=False)

    async def blindfolded(reader: LogReader, to: Step, clock: Clock) -> bool:
        token = advancing.set(True)
        try:
            return await advance(reader, to, clock)
        finally:
            advancing.reset(token)

    async def once(store: Store, identity: LakeIdentity) -> Mapping[str, ConsumerRecord]:
        return {} if advancing.get() else await look(store, identity)

    patch.setattr(run_room, "_advance", blindfolded)
    patch.setattr(run_room, "list_groups", once)


def no_announcement(patch: pytest.MonkeyPatch) -> None:
    """The floor record says nothing of where it closes before it is too late."""
    append_record = run_room._append

    async def late(floor: Floor, clock: Clock, **record: object) -> bool:
        announces = record["closing"] > record["first_live"]  # type: ignore[operator]
        return True if announces else await append_record(floor, clock, **record)  # type: ignore[arg-type]

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

    patch.setattr(consumers, "Floor", OneLook)


def on_record_is_enough(patch: pytest.MonkeyPatch) -> None:
    """What the group's newest record holds already counts as seen by every reclaimer."""

    async def nothing(floor: Floor, clock: Clock) -> Outcome:
        del floor, clock
        return Mine()

    patch.setattr(Floor, "take_back", nothing)


def any_slot(patch: pytest.MonkeyPatch) -> None:
    """The advance goes into whatever slot is free, not directly after its own closing record."""
    take = Floor.append

    async def anywhere(floor: Floor, record: FloorRecord) -> Outcome:
        await floor.refresh()
        return await take(floor, record)

    patch.setattr(Floor, "append", anywhere)


def deletes_first(patch: pytest.MonkeyPatch) -> None:
    """The data goes before the floor says so."""
    sweep, advance = run_room._sweep, run_room._advance

    async def hasty(reader: LogReader, to: Step, clock: Clock) -> bool:
        await sweep(reader, to, Need(to, ""), dry_run=False)
        return await advance(reader, to, clock)

    patch.setattr(run_room, "_advance", hasty)


def no_snapshot(patch: pytest.MonkeyPatch) -> None:
    """The floor is raised without making sure that anybody can still start from somewhere."""

    async def hope(reader: LogReader, lowest: Version) -> Version:
        del reader
        return lowest

    patch.setattr(run_room, "ensure_snapshots", hope)


def impatient_orphans(patch: pytest.MonkeyPatch) -> None:
    """Whatever no commit names is an orphan, although its producer may be about to commit it."""

    def sort(objects: Iterable[Entry], marks: Mapping[str, int], state: LogState) -> Sorted:
        found = list(objects)
        fair = sort_objects(found, marks, state)
        return Sorted(fair.dead, tuple(entry for entry in found if entry not in fair.dead))

    patch.setattr(run_room, "sort_objects", sort)


def by_record_not_by_floor(patch: pytest.MonkeyPatch) -> None:
    """What the groups need now is deleted up to, whatever the floor record of this run says."""
    sweep = run_room._sweep

    async def greedy(reader: LogReader, first_live: Step, need: Need, *, dry_run: bool) -> Report:
        return await sweep(reader, Step(max(first_live, (need.step or 0) + 1)), need, dry_run=dry_run)

    patch.setattr(run_room, "_sweep", greedy)


def no_orphans(patch: pytest.MonkeyPatch) -> None:
    """Only what was committed and is dead goes; what crashed producers left stays for ever."""

    async def none(reader: LogReader, candidates: tuple[Entry, ...], first_live: Step) -> list[Entry]:
        del reader, candidates, first_live
        return []

    patch.setattr(run_room, "_orphans", none)


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


@pytest.mark.parametrize(("mutate", "name"), MUTANTS, ids=[f"{m.__name__}: {n}" for m, n in MUTANTS])
def test_mutant_10_is_found(mutate: Mutate, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, StepfsError)):
        SCENARIOS[name]()
