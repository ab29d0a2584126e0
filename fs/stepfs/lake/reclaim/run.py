"""One reclaim, in the order that makes a kill anywhere, and a second reclaimer at any time, harmless.

the newest record and its need  →  two confirmed snapshots at or above the new floor  →  the record that gives
steps up  →  delete: data, index, log, snapshots
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import trio

from stepfs._internal import entropy
from stepfs._internal.clock import Clock, SystemClock
from stepfs.errors import CorruptError, ReclaimedError, RefusedError, StoreUnreachableError
from stepfs.format.control import ControlRecord
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Step, Version
from stepfs.format.keys import control_prefix
from stepfs.format.snapshot import LogState
from stepfs.lake.control import Control
from stepfs.lake.create_once import listed_slots
from stepfs.lake.decisions import Advance, least_need
from stepfs.lake.fork import release_origins
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import confirmed_snapshots, write_snapshot
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim.dead import last_dead_steps, payload_bytes_below
from stepfs.lake.reclaim.sweep import LastDead, Target, walk_doomed, walk_orphans
from stepfs.store.api import Entry, Store

_log = logging.getLogger("stepfs.lake.reclaim")

_ROUNDS_MAX: Final = 16
_RETRY_S: Final = 0.2
_SEARCH_MS: Final = 24 * 3_600_000  # a search of all of `data/` finds uploads that arrived late
_SEGMENT_BYTES_MAX: Final = 8 << 20  # a run moves through the lake once and does not read a segment again
_DELETES_MAX: Final = 3  # attempts, each behind a look of its own
_KEPT: Final = 2  # snapshots that can be read
_TIMELESS: Final = " (0 s by the store's clock; a store that sends no Date says so for ever: use --grace 0)"


Note = Callable[[int, int], None]  # of the objects and bytes that are deleted


@dataclass(frozen=True, slots=True)
class Need:
    """The first step that the lake as a whole still needs. `step` None: nothing may be reclaimed. `reason`: why."""

    step: Step | None
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """A run has left nothing below `swept`, and no orphan of an incarnation that `state` knows to be over."""

    swept: Target
    searched_ms: int  # when a run last searched all of `data/`
    state: LogState


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run; with `dry_run` the result that it would have."""

    floor: Version
    first_live_step: Step
    deleted_objects: int
    deleted_bytes: int
    reason: str


class CountingRemover:
    """Deletes from `store` and counts; with None it only counts. `look` raises if what was planned by is not true any more: it
    comes before each attempt, for a store may have been put back to an older copy while one got no answer.
    """

    def __init__(
        self,
        store: Store | None,
        look: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint,
        note: Note = lambda _objects, _bytes: None,
    ) -> None:
        self._store = store
        self._look = look
        self._note = note
        self.objects = 0
        self.bytes = 0

    async def remove(self, entries: Sequence[Entry]) -> None:
        if self._store is not None and entries:
            await self._delete(self._store, [entry.key for entry in entries])
        self.objects += len(entries)
        self.bytes += sum(entry.size for entry in entries)
        self._note(self.objects, self.bytes)

    async def _delete(self, store: Store, keys: Sequence[str]) -> None:
        for attempt in range(1, _DELETES_MAX + 1):
            await self._look()
            try:
                await store.delete(keys)
            except StoreUnreachableError:
                if attempt == _DELETES_MAX:
                    raise
            else:
                return

    def report(self, target: Target, reason: str) -> Report:
        return Report(target.floor, target.first_live, self.objects, self.bytes, reason)


class Reclaimer:
    """Deletes steps that no kept checkpoint of a live group needs, or needed less than `grace_s` ago. Idempotent."""

    def __init__(
        self,
        store: Store,
        identity: LakeIdentity,
        *,
        origins: OriginStores | None = None,
        max_percent: float = 100.0,
        clock: Clock | None = None,
        grace_s: float = 0.0,
        note: Callable[[int, int, int], None] = lambda _whole_bytes, _objects, _bytes: None,
    ) -> None:
        """`note` is called with about the bytes to delete, 0 if not known, and the objects and bytes that are deleted."""
        self.identity = identity
        self._note = note
        self._store = store
        self._origins = origins
        self._max_percent = max_percent
        self._clock = clock or SystemClock()
        self._grace_s = grace_s
        self._reader: LogReader | None = None
        self._progress: Progress | None = None  # of this reader's log
        self._released: Step | None = None

    async def run(self, *, dry_run: bool = False, orphans: bool = False) -> Report:
        """Run once. `orphans`: search for them even if that is not due.

        `RefusedError` when a group claims to have consumed steps that were never committed, or when more than
        `max_percent` of the live steps would be deleted at once; `CorruptError` when an object that a safe decision
        needs is unreadable.
        """
        failed: tuple[Version, int] | None = None
        for attempt in range(_ROUNDS_MAX):
            if attempt:
                await trio.sleep(entropy.uniform(0, _RETRY_S * attempt))
            try:
                report = await self._round(dry_run=dry_run, orphans=orphans)
            except (CorruptError, ReclaimedError):
                # Our view may be stale: another reclaimer deletes objects that we read, and all snapshots may be newer than
                # our head. It is corruption only if a second look finds the same damage, with nothing new in between.
                reader, found = self._reader, _position(self._reader)
                self._forget()
                same = failed == found and not (reader is not None and await reader.control.refresh())
                if same or attempt == _ROUNDS_MAX - 1:
                    raise
                failed = found
                continue
            except BaseException:
                self._forget()  # the reader may have stopped between reading and confirming
                raise
            if report is not None:
                return report
        raise RefusedError(
            "other reclaimers of this lake, or groups that come to need earlier steps, were faster every time; try again"
        )

    async def _round(self, *, dry_run: bool, orphans: bool) -> Report | None:
        """Advance if steps can be released, and delete. None: another writer moved the floor, start over."""
        reader = await self._followed()
        control = reader.control
        control.check_may_write()
        number = control.number
        ages_s = await ages_of_minima(control, self._grace_s)
        if number != control.number:
            return None
        if max((group.need for group in control.groups.values()), default=0) > reader.state.next_step:
            # A trainer may be faster than our two requests: read the log after the groups.
            await _follow(reader)
            if number != control.number:
                return None
        need = reclaim_bound(control.record, ages_s, self._grace_s, reader.state.next_step)
        _check_share(reader, need, self._max_percent)
        target = await _target(reader, need)
        before = self._progress
        live_bytes = reader.live_bytes
        search = orphans or before is None or abs(self._clock.now_ms() - before.searched_ms) >= _SEARCH_MS
        if target.first_live > reader.first_live_step:
            if dry_run:
                target = replace(target, floor=await ensure_snapshots(reader, target.floor, dry_run=True))
            else:
                advance = replace(await _prepared(reader, target), ages_s=ages_s, grace_s=self._grace_s)
                if not await control.advance(advance):
                    return None
                await _follow(reader)
                target = Target(reader.first_live_step, control.floor)
        note = partial(self._note, live_bytes - reader.live_bytes)
        report = await self._sweep(reader, target, need, note, dry_run=dry_run, search=search)
        if not dry_run and self._origins is not None and self._released != target.first_live:
            await release_origins(reader, self._origins, self._clock)
            self._released = target.first_live
        return report

    async def _followed(self) -> LogReader:
        """The log at its head, confirmed: by the reader of the last run, or by a new one."""
        if self._reader is not None:
            await _follow(self._reader)
            return self._reader
        reader = await LogReader.open(self._store, self.identity)
        reader.segments.limit(_SEGMENT_BYTES_MAX)
        reader.control.clock = self._clock
        self._reader = reader
        return reader

    def _forget(self) -> None:
        self._reader = self._progress = None  # what was read so far may be of another history

    async def _sweep(
        self, reader: LogReader, target: Target, need: Need, note: Note, *, dry_run: bool, search: bool
    ) -> Report:
        """Delete the objects below `target`, or with `dry_run` count them: both walk through the same objects."""

        async def look() -> None:
            await reader.check_history()
            await reader.control.check_history()  # the advance is the newer one

        remover = CountingRemover(None if dry_run else self._store, look, note)
        before, now_ms = self._progress, self._clock.now_ms()
        last: LastDead = {}
        if before is None or before.swept != target or search:
            last = await walk_doomed(reader, target, remover.remove, await last_dead_steps(reader, target.first_live))
        since = None if search or before is None else before.state
        await walk_orphans(reader, last, remover.remove, since=since)
        if not dry_run:
            searched_ms = now_ms if search or before is None else before.searched_ms
            self._progress = Progress(target, searched_ms, reader.state)
        return remover.report(target, need.reason)


def _position(reader: LogReader | None) -> tuple[Version, int]:
    return (Version(-2), -2) if reader is None else (reader.head.version, reader.control.number)


async def _follow(reader: LogReader) -> None:
    """Move to the head and the newest control record, and publish both: two requests when nothing is new."""
    await reader.refresh()
    while not await reader.confirm():
        await reader.refresh()


def _check_share(reader: LogReader, need: Need, max_percent: float) -> None:
    if need.step is None:
        return
    live = reader.state.next_step - reader.first_live_step
    going = need.step - reader.first_live_step
    if live and going > live * max_percent / 100:
        raise RefusedError(
            f"{going} of {live} live steps would go ({need.reason}); raise --max-percent if that is meant"
        )


async def _target(reader: LogReader, need: Need) -> Target:
    """The possible new beginning of the lake, if no group needs more meanwhile: never below the present one."""
    first_live = Step(max(need.step or 0, reader.first_live_step))
    if first_live == reader.first_live_step:
        return Target(first_live, reader.control.floor)
    lowest = reader.state.version if first_live >= reader.state.next_step else (await reader.entry(first_live)).version
    return Target(first_live, max(lowest, reader.control.floor))


async def _prepared(reader: LogReader, target: Target) -> Advance:
    """The advance; two confirmed snapshots stand at or above its floor."""
    deleted = await payload_bytes_below(reader, target.first_live)
    lowest = await ensure_snapshots(reader, target.floor)
    return Advance(target.first_live, lowest, deleted)


async def ages_of_minima(control: Control, grace_s: float) -> dict[int, float]:
    """Ages in s, by the store's clock, of the records that ended one of the minima: a mistake can be corrected for the
    time of `grace`. Without a request if there is only the present need.
    """
    former = [ended for ended, _ in control.record.minima[:-1]]
    if not former or grace_s <= 0:
        return dict.fromkeys(former, grace_s)
    prefix = control_prefix(control.identity.lake_id)
    listed = await listed_slots(control.store, prefix, after=former[0] - 1, ages=True)
    # A record that vanished is older than those after it.
    return {ended: max((entry.age_s for n, entry in listed.items() if n >= ended), default=0.0) for ended in former}


def reclaim_bound(record: ControlRecord, ages_s: Mapping[int, float], grace_s: float, next_step: Step) -> Need:
    """`RefusedError` when every group claims to have consumed steps that were never committed."""
    if not record.holding:
        return Need(None, "no group is registered: every step may still be needed")
    step = least_need(record, ages_s, grace_s)
    if step < record.need:
        timeless = "" if any(ages_s.values()) else _TIMELESS
        reason = f"step {step} was needed less than {_duration(grace_s)} ago{timeless}"
    else:
        name = min(record.holding, key=lambda group: record.groups[group].need)
        reason = f"group {name!r} needs step {step}"
    if step > next_step:
        raise RefusedError(f"{reason}, but only {next_step} are committed; is that checkpoint from another lake?")
    return Need(step, reason)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"


async def ensure_snapshots(reader: LogReader, lowest: Version, *, dry_run: bool = False) -> Version:
    """Ensure a snapshot at `lowest` or later. Returns the new floor: at most `lowest`, and no higher than the second
    newest snapshot that the log confirms. So the lake survives one damaged object: readers start from the older snapshot.
    A lake whose log still begins at version 0 needs no second one. `dry_run`: write nothing.
    """
    floor, newest = reader.control.floor, reader.state.version
    found = await _confirmed(reader)
    alone = len(found) < _KEPT and floor > 0  # one is damaged
    if not found or found[0] < lowest or (alone and found[0] < newest):
        if not dry_run:
            await write_snapshot(reader.store, reader.identity, reader.state, reader.segments, reader.control)
        found = [newest, *found][:_KEPT] if dry_run else await _confirmed(reader)
    if not found and floor > 0:
        raise CorruptError(f"{reader.store.url}: no readable snapshot is left; nothing was deleted")
    return floor if len(found) < _KEPT else max(floor, min(lowest, found[-1]))


async def _confirmed(reader: LogReader) -> list[Version]:
    """Versions of the newest confirmed snapshots, newest first, at most `_KEPT`."""
    found: list[Version] = []
    async with aclosing(confirmed_snapshots(reader.store, reader.identity)) as states:
        async for state in states:
            found.append(state.version)
            if len(found) == _KEPT:
                break
    return found
