"""One reclaim, in the order that makes a kill anywhere, and a second reclaimer at any time, harmless.

    closing record at X  →  list the groups again  →  make sure of two confirmed snapshots at or above the new floor
    →  floor record in the slot directly after our own closing record  →  delete: data, index, log, snapshots

A group that appears after the closing record sees it and takes it back; one that appeared before is in the second list.
Another reclaimer's record in the slot after ours means our list is stale: start over. Deletion works from LISTs, so
what a killed reclaimer left, temporary objects of dead producers and resurrected slots go too. Index segments and
log versions go last: they are what tells the next run which data was to go.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

import trio

from stepfs import entropy
from stepfs.clock import Clock, SystemClock
from stepfs.errors import CorruptError, RefusedError, StepfsError, StoreUnreachableError
from stepfs.floor import Floor
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step, Version
from stepfs.format.keys import (
    data_prefix,
    index_prefix,
    log_prefix,
    number_of,
    segment_of_key,
    snapshot_prefix,
)
from stepfs.format.records import RECORD_ID_BYTES, ConsumerRecord, FloorRecord, LakeIdentity
from stepfs.format.snapshot import StepEntry
from stepfs.group_records import list_groups
from stepfs.log.reader import LogReader
from stepfs.nodes import forget_nodes
from stepfs.origins import OriginStores
from stepfs.reclaim.fork import release_origins
from stepfs.reclaim.plan import Need, furthest_need, least_need, sort_objects, watermarks
from stepfs.reclaim.snapshots import ensure_snapshots
from stepfs.sequence import Mine, Unknown
from stepfs.store.api import Entry, Store

_log = logging.getLogger("stepfs.reclaim")

_ROUNDS_MAX: Final = 16
_RETRY_S: Final = 0.2
_DELETE_BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class Report:
    """What one run did, or with `dry_run` would do."""

    floor: Version
    first_live_step: Step
    deleted_objects: int
    deleted_bytes: int
    reason: str


async def reclaim(
    store: Store,
    identity: LakeIdentity,
    *,
    origins: OriginStores | None = None,
    dry_run: bool = False,
    max_percent: float = 100.0,
    clock: Clock | None = None,
) -> Report:
    """Delete what no kept checkpoint of any live group may need. Idempotent.

    `RefusedError` when a group needs what is gone already, or when more than `max_percent` of the live steps would
    go at once; `CorruptError` when something that must be read to be sure cannot be.
    """
    for attempt in range(_ROUNDS_MAX):
        if attempt:
            await trio.sleep(entropy.uniform(0, _RETRY_S * attempt))
        reader = await LogReader.open(store, identity)
        groups = await list_groups(store, identity)
        if furthest_need(groups) > reader.state.next_step:
            # A trainer may be faster than our two requests; only a log read after the groups tells.
            after = await LogReader.open(store, identity)
            if furthest_need(groups) <= after.state.next_step:
                continue
        need = least_need(groups, reader.floor, reader.state.next_step)
        _check_share(reader, need, max_percent)
        try:
            report = await _round(reader, need, clock or SystemClock(), origins, dry_run=dry_run)
        except CorruptError:
            # Another reclaimer may have deleted what we were reading; only a floor that stands still means damage.
            if not await reader.floor.refresh():
                raise
            continue
        if report is not None:
            if not dry_run:
                await _forget_silent_nodes(store, identity, groups)
            return report
    raise RefusedError("other reclaimers are working on this lake all the time; let one of them do it")


async def _forget_silent_nodes(
    store: Store, identity: LakeIdentity, groups: Mapping[str, ConsumerRecord]
) -> None:
    """What killed mounts of ended runs left. Nothing depends on it, so its failure is no failure of a reclaim."""
    try:
        await forget_nodes(store, identity, (g.group for g in groups.values() if not g.retired))
    except StepfsError as error:
        _log.info("records of mounts that are gone stay in the fleet view: %s", error)


async def _round(
    reader: LogReader, need: Need, clock: Clock, origins: OriginStores | None, *, dry_run: bool
) -> Report | None:
    """Advance if there is something to give up, and delete. None: somebody else moved, start over."""
    if dry_run:
        return await _sweep(reader, Step(max(need.step or 0, reader.first_live_step)), need, dry_run=True)
    if need.step is not None and need.step > reader.first_live_step:
        if not await _advance(reader, need.step, clock):
            return None
        reader = await LogReader.open(reader.store, reader.identity)
    report = await _sweep(reader, reader.first_live_step, need, dry_run=False)
    if origins is not None:
        await release_origins(reader, origins, clock)
    return report


def _check_share(reader: LogReader, need: Need, max_percent: float) -> None:
    if need.step is None:
        return
    live = reader.state.next_step - reader.first_live_step
    going = need.step - reader.first_live_step
    if live and going > live * max_percent / 100:
        raise RefusedError(
            f"{going} of {live} live steps would go ({need.reason}); raise --max-percent if that is meant"
        )


async def _advance(reader: LogReader, to: Step, clock: Clock) -> bool:
    """Closing record, second look at the groups, floor record. False: somebody else moved, start over."""
    floor = reader.floor
    lowest = await _version_of(reader, to)
    if not await _append(
        floor, clock, lowest=floor.floor, first_live=floor.first_live_step, closing=to, freed=0
    ):
        return False
    groups = await list_groups(reader.store, reader.identity)
    if any(not group.retired and group.need < to for group in groups.values()):
        return False
    freed = 0
    async for entry in _entries(reader, floor.first_live_step, to):
        freed += entry.tgb.payload_bytes if entry.tgb.origin == 0 else 0
    lowest = await ensure_snapshots(reader, lowest)
    return await _append(floor, clock, lowest=lowest, first_live=to, closing=to, freed=freed)


async def _append(
    floor: Floor, clock: Clock, *, lowest: Version, first_live: Step, closing: Step, freed: int
) -> bool:
    """Take the slot directly after the newest record `floor` knows; False if it is taken."""
    record = FloorRecord(
        record_id=entropy.token(RECORD_ID_BYTES),
        floor=max(lowest, floor.floor),
        first_live_step=first_live,
        closing=closing,  # earlier announcements ended when their next slot was taken
        deleted_bytes=floor.deleted_bytes + freed,
        time_ms=clock.now_ms(),
    )
    outcome = await floor.append(record)
    if isinstance(outcome, Unknown):
        raise StoreUnreachableError(
            f"{floor.store.url}: the store stopped answering{outcome.why}; nothing was deleted, run it again"
        )
    return isinstance(outcome, Mine)


async def _version_of(reader: LogReader, step: Step) -> Version:
    """The log version that published `step`, or the head's if it is still to come."""
    if step >= reader.state.next_step:
        return reader.state.version
    return (await reader.entry(step)).version


async def _entries(reader: LogReader, first: Step, end: Step) -> AsyncIterator[StepEntry]:
    for number in range(first, end):
        yield await reader.entry(Step(number))


async def _sweep(reader: LogReader, first_live: Step, need: Need, *, dry_run: bool) -> Report:
    """Delete everything below `first_live` and the floor, in the order that a kill may cut anywhere."""
    store, lake_id = reader.store, reader.identity.lake_id
    dead_segments = [
        entry for entry in await store.list(index_prefix(lake_id)) if _is_dead(lake_id, entry, first_live)
    ]
    marks = watermarks(await _dead_entries(reader, dead_segments, first_live))
    objects = await store.list(data_prefix(lake_id))
    found = sort_objects(objects, marks, reader.state)
    data = [*found.dead, *await _orphans(reader, found.candidates, first_live)]
    below = reader.floor.floor
    old = [
        entry
        for prefix in (log_prefix(lake_id), snapshot_prefix(lake_id))
        for entry in await store.list(prefix)
        if (number := number_of(prefix, entry.key)) is not None and number < below
    ]
    if not dry_run:
        for group in (data, dead_segments, old):
            for start in range(0, len(group), _DELETE_BATCH):
                await store.delete([entry.key for entry in group[start : start + _DELETE_BATCH]])
    return Report(
        floor=below,
        first_live_step=first_live,
        deleted_objects=len(data) + len(dead_segments) + len(old),
        deleted_bytes=sum(entry.size for entry in (*data, *dead_segments, *old)),
        reason=need.reason,
    )


def _is_dead(lake_id: str, entry: Entry, first_live: Step) -> bool:
    segment = segment_of_key(lake_id, entry.key)
    return segment is not None and (segment + 1) * SEGMENT_STEPS <= first_live


async def _dead_entries(reader: LogReader, dead_segments: list[Entry], first_live: Step) -> list[StepEntry]:
    """Entries below `first_live` that are still on record: in segments not deleted yet, the boundary's, the tail."""
    state = reader.state
    dead = [entry for entry in state.tail if entry.step < first_live]
    indices = {segment_of_key(reader.identity.lake_id, entry.key) for entry in dead_segments}
    boundary = SegmentIndex(first_live // SEGMENT_STEPS)
    if state.first_segment <= boundary < state.sealed_segments:
        indices.add(boundary)
    for index in sorted(index for index in indices if index is not None):
        segment = await reader.segments.load_unreferenced(index)
        if segment is not None:  # else: another reclaimer has deleted it, and the data it names before that
            dead += [entry for entry in segment.entries if entry.step < first_live]
    return dead


async def _orphans(reader: LogReader, candidates: tuple[Entry, ...], first_live: Step) -> list[Entry]:
    """Candidates that no live step names. Loads the live descriptors only if there is one candidate too many."""
    live_count = reader.state.next_step - first_live
    if len(candidates) <= live_count and not reader.state.origins:
        return []
    named = {entry.tgb.key async for entry in _entries(reader, first_live, reader.state.next_step)}
    return [entry for entry in candidates if entry.key not in named]
