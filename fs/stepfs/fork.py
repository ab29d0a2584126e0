"""A new lake that shares the immutable data of another: the answer to a loss spike.

The fork holds a group in its parent, so the parent's reclaimers keep what the fork names; then its own log starts with
one *origin* commit and the snapshot that goes with it, and its identity is written last, so a half-made fork is no
lake. Numbers of steps before STEP are the parent's: a checkpoint taken before the spike resumes in the fork
unchanged. Producers find their seq and position in the snapshot and continue where the parent's stood; what `skip`
leaves out they have already produced, and it stays out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import trio

from stepfs import entropy
from stepfs.clock import Clock
from stepfs.consumers import Group
from stepfs.errors import AbsentError, RefusedError, StepfsError, StoreUnreachableError, UsageError
from stepfs.format.commit import CommitKind, Origin, chain_digest
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step, Version
from stepfs.format.keys import floor_prefix, log_prefix, new_lake_id, numbered, segment_key, snapshot_prefix
from stepfs.format.records import RECORD_ID_BYTES, FloorRecord, LakeIdentity, encode_floor
from stepfs.format.snapshot import (
    LogState,
    Segment,
    StepEntry,
    encode_segment,
    encode_snapshot,
    genesis,
    pack_ref,
)
from stepfs.lake import create_lake, open_lake, refuse_existing
from stepfs.log.append import ownerless
from stepfs.log.reader import LogReader
from stepfs.log.rehearsal import rehearsed
from stepfs.sequence import Unknown, take_slot
from stepfs.store.api import Store

_FIRST_VERSION: Final = Version(1)  # with floor 1 nobody takes the origin commit for the start of a history
_RETIRE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Cut:
    """Which parent steps a fork has: those before `step`, then those from `step` on outside [skip_first, skip_end)."""

    step: Step
    skip_first: Step
    skip_end: Step

    def parent_steps(self, first_live: Step, next_step: Step) -> list[range]:
        """Stretches of parent steps in the fork's order. `UsageError` if they do not fit the parent."""
        if not first_live <= self.step <= next_step:
            raise UsageError(
                f"the fork point must be a live step: {first_live} to {next_step}, not {self.step}"
            )
        if not self.step <= self.skip_first <= self.skip_end:
            raise UsageError(
                f"--skip {self.skip_first}:{self.skip_end} must lie at or after step {self.step}"
            )
        kept_until, kept_from = min(self.skip_first, next_step), min(self.skip_end, next_step)
        return [range(first_live, kept_until), range(kept_from, next_step)]


async def fork(parent: LogReader, store: Store, cut: Cut, clock: Clock) -> LakeIdentity:
    """Create the lake `store` as a fork of `parent`. `RefusedError` if there is a lake already."""
    await refuse_existing(store)
    # A mistake is said before anything is written.
    cut.parent_steps(parent.first_live_step, parent.state.next_step)
    lake_id = new_lake_id()
    group = Group.of(parent.store, parent.identity, group_name(lake_id), clock)
    await group.add(parent.first_live_step)
    filled = False
    try:
        await _write(parent, store, lake_id, cut, clock)
        filled = True
        return await create_lake(
            store, slices=parent.identity.slices, ext=parent.identity.ext, clock=clock, lake_id=lake_id
        )
    except BaseException as error:
        # A fork that is there, whatever became of the answer, needs what the group holds.
        with trio.move_on_after(_RETIRE_S, shield=True), suppress(StepfsError):
            if not filled or (isinstance(error, RefusedError) and not await _exists(store, lake_id)):
                await group.retire()
        raise


async def _exists(store: Store, lake_id: str) -> bool:
    try:
        return (await open_lake(store)).lake_id == lake_id
    except AbsentError:
        return False


async def _write(parent: LogReader, store: Store, lake_id: str, cut: Cut, clock: Clock) -> None:
    """Everything but the identity, which makes it a lake."""
    await parent.poll()
    stretches = cut.parent_steps(parent.first_live_step, parent.state.next_step)
    origin = Origin(
        url=parent.store.url,
        lake_id=parent.identity.lake_id,
        skip_first=cut.skip_first,
        skip_end=cut.skip_end,
        end=Step(parent.first_live_step + sum(map(len, stretches))),
    )
    state = await _fill(parent, store, lake_id, origin, _renumbered(parent, stretches), clock=clock)
    record = FloorRecord(
        record_id=entropy.token(RECORD_ID_BYTES),
        floor=_FIRST_VERSION,
        first_live_step=parent.first_live_step,
        closing=parent.first_live_step,
        deleted_bytes=0,
        time_ms=state.time_ms,
    )
    await _create(store, numbered(floor_prefix(lake_id), 0), encode_floor(lake_id, record))


def group_name(child_lake_id: str) -> str:
    """The group by which a fork holds on to its parent's data."""
    return f"fork:{child_lake_id}"


async def _renumbered(parent: LogReader, stretches: list[range]) -> AsyncIterator[StepEntry]:
    """The parent's entries as the fork's: dense step numbers, every object one origin further away."""
    step = stretches[0].start
    for stretch in stretches:
        for number in stretch:
            entry = await parent.entry(Step(number))
            tgb = replace(entry.tgb, origin=entry.tgb.origin + 1)
            yield replace(entry, step=Step(step), version=_FIRST_VERSION, tgb=tgb)
            step += 1


async def _fill(
    parent: LogReader,
    store: Store,
    lake_id: str,
    origin: Origin,
    entries: AsyncIterator[StepEntry],
    *,
    clock: Clock,
) -> LogState:
    """Write the fork's segments, origin commit and snapshot; everything but what makes it a lake."""
    first_live = parent.first_live_step
    first_segment = SegmentIndex(first_live // SEGMENT_STEPS)
    base = genesis(lake_id, parent.identity.slices)
    # Steps of the boundary segment that the parent has given up stand as empty places, so that segments stay whole.
    kept: list[StepEntry] = await _placeholders(parent, first_segment, first_live)
    full: list[list[StepEntry]] = []
    async for entry in entries:
        kept.append(entry)
        if len(kept) == SEGMENT_STEPS:
            full.append(kept)
            kept = []
    assert (first_segment + len(full)) * SEGMENT_STEPS + len(kept) == origin.end
    live = [entry for part in (*full, kept) for entry in part if entry.step >= first_live]
    head = replace(
        base,
        version=Version(_FIRST_VERSION - 1),
        next_step=origin.end,
        time_ms=parent.state.time_ms,
        total_bytes=sum(entry.tgb.payload_bytes for entry in live),
        total_records=sum(entry.tgb.records for entry in live),
    )
    commit = replace(ownerless(head, CommitKind.ORIGIN, clock), origin=origin)
    body = rehearsed(head, commit)
    digest = chain_digest(commit.prev_digest, body)
    segments = [
        Segment(SegmentIndex(first_segment + number), digest, tuple(part)) for number, part in enumerate(full)
    ]
    state = replace(
        head,
        version=commit.version,
        digest=digest,
        time_ms=commit.time_ms,
        producers={
            name: replace(producer, version=commit.version)
            for name, producer in parent.state.producers.items()
        },
        origins=(origin, *parent.state.origins),
        first_segment=first_segment,
        segment_refs=b"".join(pack_ref(segment) for segment in segments),
        tail=tuple(kept),
    )
    for segment in segments:
        await _create(store, segment_key(lake_id, segment.index), encode_segment(lake_id, segment))
    await _create(store, numbered(log_prefix(lake_id), commit.version), body)
    await _create(store, numbered(snapshot_prefix(lake_id), commit.version), encode_snapshot(state))
    return state


async def _placeholders(parent: LogReader, first_segment: SegmentIndex, first_live: Step) -> list[StepEntry]:
    """Entries for the steps of a segment that lie below the first live one; they are never shown nor read."""
    start = first_segment * SEGMENT_STEPS
    if first_live == start:
        return []
    # Any entry will do; one of the tail when all steps have been given up (it is not empty: the end is not aligned).
    live = first_live < parent.state.next_step
    pattern = await parent.entry(first_live) if live else parent.state.tail[-1]
    tgb = replace(pattern.tgb, origin=pattern.tgb.origin + 1)
    return [
        replace(pattern, step=Step(step), version=_FIRST_VERSION, tgb=tgb)
        for step in range(start, first_live)
    ]


async def _create(store: Store, key: str, body: bytes) -> None:
    outcome = await take_slot(store, key, body)
    if isinstance(outcome, Unknown):
        raise StoreUnreachableError(
            f"{store.url}: the store stopped answering{outcome.why}; fork again, to the same or another URL"
        )
