"""One reclaim, in the order that makes a kill anywhere, and a second reclaimer at any time, harmless.

    the newest control record and its need  →  make sure of two confirmed snapshots at or above the new floor
    →  create the control record after it, which gives the steps up  →  delete: data, index, log, snapshots

A group that changes meanwhile takes the slot of our advance, which is decided again on its record; if it needs more, or if
another reclaimer was faster, the run starts over. Deletion works from LISTs,
so leftovers of a killed reclaimer, uploads of dead producers and resurrected slots are deleted too (`sweep`).

A run that finds nothing new costs three requests in a process that goes on, and six in a new one (`progress`), however
long the lake is.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import trio

from stepfs import entropy
from stepfs.clock import Clock, SystemClock
from stepfs.errors import CorruptError, ReclaimedError, RefusedError
from stepfs.format.ids import Step, Version
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import LogState
from stepfs.lake.decisions import Advance
from stepfs.lake.fork_group import release_origins
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim.need import Need, ages_of_minima, needed
from stepfs.lake.reclaim.plan import Target
from stepfs.lake.reclaim.progress import Progress, is_of_the_log, open_near, read_progress, write_progress
from stepfs.lake.reclaim.report import CountingRemover, Report
from stepfs.lake.reclaim.snapshots import ensure_snapshots, planned_floor
from stepfs.lake.reclaim.sweep import LastDead, live_entries, walk_doomed, walk_orphans
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.lake.reclaim")

_ROUNDS_MAX: Final = 16
_RETRY_S: Final = 0.2
_SEARCH_MS: Final = 24 * 3_600_000  # a search of all of `data/` finds uploads that arrived late
_SEGMENT_BYTES_MAX: Final = 8 << 20  # a run moves through the lake once and does not read a segment again
_BEHIND_MAX: Final = 8  # versions: a record of progress that is further back is written again


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
    ) -> None:
        self.identity = identity
        self._store = store
        self._origins = origins
        self._max_percent = max_percent
        self._clock = clock or SystemClock()
        self._grace_s = grace_s
        self._reader: LogReader | None = None
        self._progress: Progress | None = None
        self._is_near = True  # a new reader may begin at the record of progress
        self._is_sure = True  # the log confirms the record of progress
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
                found = _position(self._reader)
                self._reader, self._is_near = None, False
                if (found is not None and failed == found) or attempt == _ROUNDS_MAX - 1:
                    raise
                failed = found
                continue
            except BaseException:
                self._reader = None  # it may have stopped between reading and confirming
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
        number = control.number
        ages_s = await ages_of_minima(control, self._grace_s)
        if number != control.number:
            return None
        if max((group.need for group in control.groups.values()), default=0) > reader.state.next_step:
            # A trainer may be faster than our two requests: read the log after the groups.
            await _follow(reader)
            if number != control.number:
                return None
        need = needed(control.record, ages_s, self._grace_s, reader.state.next_step)
        _check_share(reader, need, self._max_percent)
        target = await _target(reader, need)
        advances = target.first_live > reader.first_live_step  # the record may know a later control record
        is_idle = self._progress is not None and self._progress.swept == target and not advances
        search = orphans or self._is_search_due()
        if not self._is_sure and (search or not is_idle) and not await self._check_progress():
            self._reader, self._is_near = None, False
            return None
        if advances:
            if dry_run:
                target = replace(target, floor=await planned_floor(reader, target.floor))
            else:
                advance = replace(await _prepared(reader, target), ages_s=ages_s, grace_s=self._grace_s)
                if not await control.advance(advance):
                    return None
                await _follow(reader)
                target = Target(reader.first_live_step, control.floor)
        report = await self._sweep(reader, target, need, dry_run=dry_run, search=search)
        if not dry_run and self._origins is not None and self._released != target.first_live:
            await release_origins(reader, self._origins, self._clock)
            self._released = target.first_live
        return report

    async def _followed(self) -> LogReader:
        """The log at its head, confirmed: by the reader of the last run, or by a new one."""
        if self._reader is not None:
            await _follow(self._reader)
            return self._reader
        progress = self._progress = await read_progress(self._store, self.identity)
        reader = None
        if progress is not None and self._is_near:
            reader = await open_near(self._store, self.identity, progress)
            self._is_sure = reader is not None and reader.head.version > progress.state.version
        if reader is None:
            reader = await LogReader.open(self._store, self.identity)
            await self._check_progress()
        reader.segments.limit(_SEGMENT_BYTES_MAX)
        reader.control.clock = self._clock
        self._reader = reader
        return reader

    async def _check_progress(self) -> bool:
        """Forget the record of progress unless the log confirms it: False."""
        self._is_sure = True
        if self._progress is not None and not await is_of_the_log(self._store, self._progress.state):
            self._progress = None
        return self._progress is not None

    def _is_search_due(self) -> bool:
        before = self._progress
        return before is None or abs(self._clock.now_ms() - before.searched_ms) >= _SEARCH_MS

    async def _sweep(self, reader: LogReader, target: Target, need: Need, *, dry_run: bool, search: bool) -> Report:
        """Delete the objects below `target`, or with `dry_run` count them: both walk through the same objects."""
        remover = CountingRemover(None if dry_run else self._store)
        before, now_ms, number = self._progress, self._clock.now_ms(), max(reader.control.number, 0)
        last: LastDead = {}
        if before is None or before.swept != target or search:
            last = await walk_doomed(reader, target, remover.remove)
        since = None if search or before is None else before.state
        await walk_orphans(reader, last, remover.remove, since=since)
        if not dry_run:
            searched_ms = now_ms if search or before is None else before.searched_ms
            await self._note(Progress(number, target, searched_ms, reader.state))
        return remover.report(target, need.reason)

    async def _note(self, now: Progress) -> None:
        """Record where this run stood, unless the record of an earlier one serves as well."""
        if self._progress is None or _differs(self._progress, now):
            self._progress = now
            if now.state.version >= 0:
                await write_progress(self._store, now)


def _differs(before: Progress, now: Progress) -> bool:
    return (
        (before.control, before.swept, before.searched_ms, before.state.sealed)
        != (now.control, now.swept, now.searched_ms, now.state.sealed)
        or now.state.version > before.state.version + _BEHIND_MAX
        or _epochs(before.state) != _epochs(now.state)
    )


def _epochs(state: LogState) -> dict[str, int]:
    return {name: producer.epoch for name, producer in state.producers.items()}


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
    deleted = reader.control.record.deleted_bytes
    async with aclosing(live_entries(reader, reader.control.first_live_step, target.first_live)) as parts:
        async for part in parts:
            deleted += sum(entry.tgb.payload_bytes for entry in part)  # a fork's inherited ones were live here, too
    lowest = await ensure_snapshots(reader, target.floor)
    return Advance(target.first_live, lowest, deleted)
