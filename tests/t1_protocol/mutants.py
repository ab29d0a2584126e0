"""Mutants that several rooms of this layer must catch: each puts one classic mistake back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from stepfs.format.commit import Commit
from stepfs.format.control import ControlRecord
from stepfs.format.ids import Step, Version
from stepfs.format.keys import DataName
from stepfs.format.snapshot import LogState, ProducerState
from stepfs.lake import decisions as decisions_room
from stepfs.lake.control import Control
from stepfs.lake.create_once import Mine, SlotLost, SlotOutcome
from stepfs.lake.decisions import Advance, Request, decide
from stepfs.lake.log import reader as reader_room
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim import run as run_room
from stepfs.lake.reclaim import sweep as sweep_room
from stepfs.lake.reclaim.run import CountingRemover
from stepfs.lake.reclaim.sweep import Do, LastDead, Target, walk_doomed
from stepfs.store.api import Put, Store
from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit.rebase import Durable, Incarnation, Refusal, Stamp, rebase


def forgetful_rebase(head: LogState, pending: Sequence[Durable], me: Incarnation, stamp: Stamp) -> Commit | Refusal:
    """A writer without the guard by seq: whatever is pending is new."""
    known = head.producers[me.producer_id]
    fresh = [replace(item, tgb=replace(item.tgb, seq=known.next_seq + number)) for number, item in enumerate(pending)]
    return rebase(head, fresh, me, stamp)


async def trusting_take_slot(store: Store, key: str, body: bytes, _look: object = None) -> SlotOutcome:
    """A writer that believes the first answer: anything but success is a conflict."""
    return Mine() if await store.create(key, body) is Put.CREATED else SlotLost(taken=True)


def undecided_is_believed(patch: pytest.MonkeyPatch) -> None:
    """A create that was undecided and then has an answer needs no look at the floor."""
    committer = commit_loop.Committer
    take, settle = committer._take, committer._settle_mine
    undecided: list[commit_loop._Attempt] = []

    async def noted(
        self: commit_loop.Committer, attempt: commit_loop._Attempt, lost: commit_loop.Lost | None
    ) -> commit_loop.CommitOutcome:
        outcome = await take(self, attempt, lost)
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


def never_rebuilt(patch: pytest.MonkeyPatch) -> None:
    """What is not under `index/` is lost, as it is for a reader that goes on from the state of another process."""

    async def absent(*_: object) -> None:
        return None

    patch.setattr(reader_room, "rebuilt_segment", absent)


async def _trust(reader: LogReader, *, lenient: bool = False) -> bool:
    del lenient
    await reader.control.refresh()  # for the groups, which a reclaimer needs
    reader.state = reader.head
    return True


def never_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogReader, "confirm", _trust)


def never_looks_back(patch: pytest.MonkeyPatch) -> None:
    """The log, and the control sequence, have what they had."""

    async def believes(_known: LogReader | Control, *_record: object, **_or: object) -> bool:
        return True

    patch.setattr(LogReader, "check_history", believes)
    patch.setattr(Control, "_has", believes)


def only_probes_are_checked(patch: pytest.MonkeyPatch) -> None:
    """A slot that was not probed (a LIST showed it, or it was taken after a reopen) needs no look at the floor."""
    confirm, read = LogReader.confirm, LogReader._read_listed

    async def untouched(reader: LogReader, *listed: Any) -> Version | None:
        lowest = reader._lowest_unconfirmed
        behind = await read(reader, *listed)
        reader._lowest_unconfirmed = lowest
        return behind

    patch.setattr(LogReader, "_read_listed", untouched)

    async def believe(reader: LogReader, *, lenient: bool = False) -> bool:
        del lenient
        if reader._lowest_unconfirmed is not None:
            return await confirm(reader)
        await reader.control.refresh()
        reader.state, reader.first_live_step = reader.head, reader.control.first_live_step
        return True

    patch.setattr(LogReader, "confirm", believe)


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

    async def greedy(reader: LogReader, target: Target, do: Do, known: LastDead | None = None) -> LastDead:
        del known
        return await walk_doomed(reader, replace(target, first_live=Step(target.first_live + 1)), do)

    patch.setattr(run_room, "walk_doomed", greedy)


def no_orphans(patch: pytest.MonkeyPatch) -> None:
    """Only what was committed and is dead goes; what crashed producers left stays for ever."""

    async def nothing(*_: object, **__: object) -> None:
        """Looks at none, due or asked for."""

    patch.setattr(run_room, "walk_orphans", nothing)
