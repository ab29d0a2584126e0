"""Would the simulator notice? One classic mistake at a time goes into the real code; some early seed must break.

The directed tests aim at each hazard; this shows that random clusters, which aim at nothing, meet them too.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
from cluster import simulate
from flavours import Flavour
from mutants import (
    by_record_not_by_floor,
    decided_once,
    deletes_first,
    forgetful_rebase,
    groups_unseen,
    impatient_orphans,
    late_steps_are_taken,
    never_look,
    never_looks_back,
    never_rebuilt,
    no_compare,
    no_orphans,
    no_snapshot,
    only_probes_are_checked,
    trusting_take_slot,
    undecided_is_believed,
)

from stepfs.errors import StepfsError
from stepfs.format.control import ControlRecord
from stepfs.format.ids import Step
from stepfs.format.keys import control_prefix, number_of
from stepfs.format.snapshot import LogState, ProducerState
from stepfs.format.tgb import Descriptor
from stepfs.lake import control as control_room
from stepfs.lake import decisions as decisions_room
from stepfs.lake import fork as fork_room
from stepfs.lake.control import Control
from stepfs.lake.decisions import Add, Register, Request, Resume, successor
from stepfs.lake.log import snapshots as snapshots_room
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim import run as run_room
from stepfs.lake.reclaim.dead import payload_bytes_below
from stepfs.lake.replicate import Copier, Replica, _nothing
from stepfs.store.api import Store
from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit import rebase as rebase_room
from stepfs_producer.commit.producer import TgbWriter
from stepfs_producer.commit.rebase import Incarnation
from stepfs_producer.commit.uploads import CommitWindow, Item

SEEDS_MAX = 150


def own_success_is_a_conflict(patch: pytest.MonkeyPatch) -> None:
    """Hazards 2 and 3: the first answer is believed, and what is pending is new whatever the head says."""
    patch.setattr(commit_loop, "take_slot", trusting_take_slot)
    patch.setattr(commit_loop, "rebase", forgetful_rebase)


def pending_is_cleared(patch: pytest.MonkeyPatch) -> None:
    """Hazard 5: a commit takes everything with it that is pending by then."""
    drop = CommitWindow.committed_below

    def clear(pending: CommitWindow, next_seq: int) -> int:
        return drop(pending, max(next_seq, pending.first_seq + pending.ready_tgbs))

    patch.setattr(CommitWindow, "committed_below", clear)


def state_expires(patch: pytest.MonkeyPatch) -> None:
    """Hazard 6: a snapshot forgets producers that have been idle."""
    keep = snapshots_room.encode_snapshot  # type: ignore[attr-defined]

    def expire(state: LogState) -> bytes:
        recent = {name: known for name, known in state.producers.items() if state.version - known.version < 3}
        return keep(replace(state, producers=recent))

    patch.setattr(snapshots_room, "encode_snapshot", expire)


def no_epoch_guard(patch: pytest.MonkeyPatch) -> None:
    """A zombie does not look whether somebody has taken its place."""

    def live(head: LogState, me: Incarnation) -> ProducerState:
        return replace(head.producers[me.producer_id], epoch=me.epoch, incarnation=me.incarnation)

    patch.setattr(rebase_room, "_live_state", live)


def commits_before_durable(patch: pytest.MonkeyPatch) -> None:
    """A TGB joins the next commit when its upload begins."""

    async def eager(writer: TgbWriter, item: Item, key: str) -> Descriptor:
        image = await writer._build(item)

        async def send() -> None:
            with suppress(StepfsError):
                await writer._store.put(key, image.parts)

        trio.lowlevel.spawn_system_task(send)
        return Descriptor(0, key, image.size, item.seq, image.packed_slices, image.packed_blocks)

    patch.setattr(TgbWriter, "write", eager)


def forgetful_of_grace(patch: pytest.MonkeyPatch) -> None:
    """A record carries no need but the present one."""

    def present(number: int, record: ControlRecord, **changes: object) -> ControlRecord:
        following = successor(number, record, **changes)
        return replace(following, minima=following.minima[-1:])

    patch.setattr(decisions_room, "successor", present)
    patch.setattr(control_room, "successor", present)


def nothing_is_fenced(patch: pytest.MonkeyPatch) -> None:
    """An equal record is believed, though a request of a former life, or of this one, may still land."""
    change = Control.change

    async def trusting(control: Control, request: Request) -> ControlRecord:
        control._unanswered = None
        return await change(control, request)

    patch.setattr(Control, "change", trusting)
    for kind in (Register, Add, Resume):
        patch.setattr(kind, "fences", False)


def copy_named_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    """A replica's log goes before its data."""
    in_order = Copier.in_order

    async def hasty(copier: Copier, parts: Any, publish: Any, *, again: bool = False) -> None:
        await publish([item for _, item in parts])
        await in_order(copier, [(named, None) for named, _ in parts], _nothing, again=again)

    patch.setattr(Copier, "in_order", hasty)


def nothing_is_held_for_a_copy(patch: pytest.MonkeyPatch) -> None:
    """The lake knows nothing of the runs that read a replica."""

    async def nowhere(*_: object, **__: object) -> None:
        """Records nothing."""

    patch.setattr(Replica, "_hold", nowhere)


def one_control_record(patch: pytest.MonkeyPatch) -> None:
    """A fork begins with one control record: where that is lost, what it does not have counts as steps."""
    create = fork_room._create

    async def but_the_second(store: Store, key: str, body: bytes) -> None:
        if number_of(control_prefix(key.partition("/")[0]), key) != 1:
            await create(store, key, body)

    patch.setattr(fork_room, "_create", but_the_second)


def ages_of_the_records_after(patch: pytest.MonkeyPatch) -> None:
    """A need is as old as the record after the one that ended it."""
    ages = run_room.ages_of_minima

    async def younger(control: Control, grace_s: float) -> dict[int, float]:
        found = await ages(control, grace_s)
        listed = await control.store.list(control_prefix(control.identity.lake_id), ages=True)
        return {ended: max([0.0, *(entry.age_s for entry in listed[ended + 1 :])]) for ended in found}

    patch.setattr(run_room, "ages_of_minima", younger)


def a_step_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    """What an advance gives up is counted but for its last step."""

    async def short(reader: LogReader, first_live: Step) -> int:
        return await payload_bytes_below(reader, Step(max(0, first_live - 1)))

    patch.setattr(run_room, "payload_bytes_below", short)


LEANS = {  # these windows are one request wide: ordinary seeds meet them once in hundreds
    late_steps_are_taken: Flavour.RUSH,
    only_probes_are_checked: Flavour.SLEEPERS,
    undecided_is_believed: Flavour.SLEEPERS,
    decided_once: Flavour.WRITERS,
    nothing_is_fenced: Flavour.LATE,
}

FOUND_BY = {  # seeds that noticed before: tried first, for a search from 0 costs dozens of clusters
    own_success_is_a_conflict: (28, 13),
    no_epoch_guard: (7,),
    no_orphans: (33, 43),
    nothing_is_fenced: (7, 15),
    only_probes_are_checked: (23, 70),
    never_rebuilt: (11, 24),
    one_control_record: (22, 73),
    never_looks_back: (168, 174),
}


@pytest.mark.logs(".*")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mutate", [
        never_look, own_success_is_a_conflict, pending_is_cleared, state_expires, no_epoch_guard,
        commits_before_durable, no_compare, groups_unseen, decided_once, late_steps_are_taken,
        forgetful_of_grace, nothing_is_fenced, deletes_first, no_snapshot, no_orphans, impatient_orphans,
        by_record_not_by_floor, only_probes_are_checked, never_rebuilt, undecided_is_believed,
        copy_named_before_it_is_there, nothing_is_held_for_a_copy, never_looks_back,
        one_control_record, ages_of_the_records_after, a_step_is_not_counted,
    ], ids=lambda mutate: mutate.__name__,
)  # fmt: skip
def test_mutant_is_found_by_the_simulator(mutate, monkeypatch):
    mutate(monkeypatch)
    flavour = LEANS.get(mutate)
    seeds = dict.fromkeys((*FOUND_BY.get(mutate, ()), *range(SEEDS_MAX)))
    found = any(simulate(seed, flavour=flavour).broken for seed in seeds)
    assert found, f"{SEEDS_MAX} seeds noticed nothing"
