"""One reclaim, in the order that makes a kill anywhere, and a second reclaimer at any time, harmless.

    closing record at X  →  look at the groups again  →  make sure of two confirmed snapshots at or above the new floor
    →  floor record in the slot directly after our own closing record  →  delete: data, index, log, snapshots

A group that appears after the closing record sees it and withdraws it; the second look at the groups shows one that
appeared before. Another reclaimer's record in the slot after ours means our look is stale: start over. Deletion works
from LISTs, so leftovers of a killed reclaimer, uploads of dead producers and resurrected slots are deleted too (`sweep`).

A `Reclaimer` runs repeatedly: it follows the log and remembers group records and how far it has swept, so a run that
finds nothing new costs five requests, however long the lake is.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import trio

from stepfs import entropy
from stepfs.clock import Clock, SystemClock
from stepfs.errors import CorruptError, ReclaimedError, RefusedError, StepfsError, StoreUnreachableError
from stepfs.format.ids import Step, Version
from stepfs.format.records import TOMBSTONES_MAX, FloorRecord, LakeIdentity
from stepfs.lake.fleet import list_nodes_outside
from stepfs.lake.floor import Floor
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim.follow import opened, refreshed
from stepfs.lake.reclaim.fork import release_origins
from stepfs.lake.reclaim.groups import GroupWatch, Look
from stepfs.lake.reclaim.plan import Need, Target, epochs, furthest_need, holds_back, least_need, orphans_due
from stepfs.lake.reclaim.report import CountingRemover, Report
from stepfs.lake.reclaim.snapshots import ensure_snapshots, planned_floor
from stepfs.lake.reclaim.sweep import live_entries, walk_doomed
from stepfs.lake.sequence import Mine, Unknown
from stepfs.store.api import Entry, Store

_log = logging.getLogger("stepfs.lake.reclaim")

_ROUNDS_MAX: Final = 16
_RETRY_S: Final = 0.2


async def reclaim(
    store: Store,
    identity: LakeIdentity,
    *,
    origins: OriginStores | None = None,
    dry_run: bool = False,
    max_percent: float = 100.0,
    clock: Clock | None = None,
    grace_s: float = 0.0,
    orphans: bool = False,
) -> Report:
    """One run of a `Reclaimer`."""
    reclaimer = Reclaimer(
        store, identity, origins=origins, max_percent=max_percent, clock=clock, grace_s=grace_s
    )
    return await reclaimer.run(dry_run=dry_run, orphans=orphans)


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
        self._watch = GroupWatch(store, identity, grace_s)
        self._reader: LogReader | None = None
        self._swept: Target | None = None  # as far as this process knows, nothing is left below this
        self._fresh = True  # no run has looked for orphans yet
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
                # Our view may be stale: another reclaimer deletes what we read, and all snapshots may be newer than
                # our head. It is corruption only if a second look finds the same damage, with nothing new in between.
                found = _position(self._reader)
                self._reader = None
                if failed == found or attempt == _ROUNDS_MAX - 1:
                    raise
                failed = found
                continue
            except BaseException:
                self._reader = None  # it may have stopped between reading and confirming
                raise
            if report is not None:
                return report
        raise RefusedError("other reclaimers are working on this lake all the time; let one of them do it")

    async def _round(self, *, dry_run: bool, orphans: bool) -> Report | None:
        """Advance if steps can be released, and delete. None: another writer moved the floor, start over."""
        self._reader = reader = await (
            opened(self._store, self.identity) if self._reader is None else refreshed(self._reader)
        )
        look = await self._watch.look(reader.floor)
        if furthest_need(look.groups) > reader.state.next_step:
            # A trainer may be faster than our two requests: read the log after the groups.
            await refreshed(reader)
            if furthest_need(look.groups) <= reader.state.next_step:
                return None
        need = least_need(look.groups, reader.floor, reader.state.next_step, grace_s=self._grace_s)
        _check_share(reader, need, self._max_percent)
        target = await _target(reader, need)
        if dry_run and target.first_live > reader.first_live_step:
            target = replace(target, floor=await planned_floor(reader, target.floor))
        elif target.first_live > reader.first_live_step:
            if not await _advance(reader, target, self._watch, self._clock, self._grace_s):
                return None
            await refreshed(reader)
            target = Target(reader.first_live_step, reader.floor.floor)
        report = await self._sweep(reader, target, look, need, dry_run=dry_run, orphans=orphans)
        if not dry_run and self._origins is not None and self._released != target.first_live:
            await release_origins(reader, self._origins, self._clock)
            self._released = target.first_live
        return report

    async def _sweep(
        self, reader: LogReader, target: Target, look: Look, need: Need, *, dry_run: bool, orphans: bool
    ) -> Report:
        """Delete the objects below `target`, or with `dry_run` count them: both walk through the same objects."""
        remover = CountingRemover(None if dry_run else self._store)
        orphans = orphans or orphans_due(reader.state, reader.floor, self._clock.now_ms(), fresh=self._fresh)
        if orphans or self._swept != target:
            await _delete(reader, target, remover, orphans=orphans)
        await remover.remove_if_allowed(look.spent)
        await remover.remove_if_allowed(
            await _silent_nodes(self._store, self.identity, look.live_directories)
        )
        if not dry_run:
            self._swept = target
            self._fresh = self._fresh and not orphans
            await self._announce(reader, look, orphans=orphans)
        return remover.report(target, need.reason)

    async def _announce(self, reader: LogReader, look: Look, *, orphans: bool) -> None:
        """Record in a floor record facts that save other processes work, unless it has them: at most one create per
        change.

        Every record holds its reclaimer's grace, but none is written to shorten it: writers keep group records for as
        long as the reclaimer that wrote last must see them, and a reclaimer that advances with a shorter grace deletes
        first anyway.
        """
        floor = reader.floor
        changes: dict[str, object] = {}
        grace_ms = round(self._grace_s * 1000)
        if self._grace_s > floor.grace_s:
            changes["grace_ms"] = grace_ms
        if orphans:
            changes |= {"swept_epochs": epochs(reader.state), "swept_ms": self._clock.now_ms()}
        listed = await floor.tombstones()
        buried = look.tombstones
        if any(listed.get(group) != slot for group, slot in buried.items()):
            bounded = dict(sorted(buried.items())[:TOMBSTONES_MAX])
            if bounded != listed:
                changes["tombstones"] = bounded
        if changes:
            # Taking this slot ends the announcement of the one before. If another writer has it, the next run records
            # it.
            changes |= {"grace_ms": grace_ms, "closing": floor.first_live_step}
            await floor.append(floor.successor(self._clock, **changes))


def _position(reader: LogReader | None) -> tuple[Version, int]:
    return (Version(-2), -2) if reader is None else (reader.head.version, reader.floor.number)


async def _delete(reader: LogReader, target: Target, remover: CountingRemover, *, orphans: bool) -> None:
    await walk_doomed(reader, target, remover.remove, orphans=orphans)


async def _silent_nodes(store: Store, identity: LakeIdentity, live: set[str]) -> list[Entry]:
    """The records that killed mounts of ended runs left. They are informative only: a failure here fails no
    reclaim."""
    try:
        return await list_nodes_outside(store, identity, live)
    except StepfsError as error:
        _log.info("records of mounts that are gone stay in the fleet view: %s", error)
        return []


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
        return Target(first_live, reader.floor.floor)
    lowest = (
        reader.state.version
        if first_live >= reader.state.next_step
        else (await reader.entry(first_live)).version
    )
    return Target(first_live, max(lowest, reader.floor.floor))


async def _advance(
    reader: LogReader, target: Target, watch: GroupWatch, clock: Clock, grace_s: float
) -> bool:
    """Closing record, second look at the groups, floor record. False: another writer moved the floor, start over."""
    floor = reader.floor
    to = target.first_live
    grace_ms = round(grace_s * 1000)
    if not await _append(floor, floor.successor(clock, closing=to, grace_ms=grace_ms)):
        return False
    if not await _lets_go(watch, floor, to):
        return False
    freed = 0
    async with aclosing(live_entries(reader, floor.first_live_step, to)) as parts:
        async for part in parts:
            freed += sum(entry.tgb.payload_bytes for entry in part if entry.tgb.origin == 0)
    lowest = await ensure_snapshots(reader, target.floor)
    advanced = floor.successor(
        clock,
        floor=lowest,
        first_live_step=to,
        closing=to,
        deleted_bytes=floor.deleted_bytes + freed,
    )
    return await _append(floor, advanced)


async def _lets_go(watch: GroupWatch, floor: Floor, to: Step) -> bool:
    """Whether it is certain that no group needs a step below `to`; False also if the groups change all the time."""
    for _ in range(_ROUNDS_MAX):
        look = await watch.look(floor)
        if holds_back(look.groups, to):
            return False
        if look.certain:
            return True
    return False


async def _append(floor: Floor, record: FloorRecord) -> bool:
    """Take the slot directly after the newest record `floor` knows; False if it is taken."""
    outcome = await floor.append(record)
    if isinstance(outcome, Unknown):
        raise StoreUnreachableError(
            f"{floor.store.url}: the store stopped answering{outcome.why}; nothing was deleted, run it again"
        )
    return isinstance(outcome, Mine)
