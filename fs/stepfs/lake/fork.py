"""A new lake that shares the immutable data of another: the answer to a loss spike, and to damage.

The fork first registers a group in its parent (fork_group.py), so the parent's reclaimers keep the objects that the fork
names; one that shares no step needs none. Its own log starts with one *origin* commit and the snapshot that belongs to
it. Its identity is written last, and only after a look that the group still stands, so a half-made fork is no lake. Steps
before STEP keep the parent's numbers: a checkpoint from before the spike resumes in the fork. Producers continue at their
seq and position in the snapshot, and do not produce again what `skip` and `until` leave out, unless `rewind` takes them
back to `until`; in the fork of a damaged parent they produce the steps after its last good commit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Final

import trio

from stepfs import entropy
from stepfs.clock import Clock
from stepfs.errors import AbsentError, RefusedError, StepfsError, UsageError, command
from stepfs.format.commit import CommitKind, Origin, chain_digest
from stepfs.format.control import RECORD_ID_BYTES, ControlRecord, encode_control
from stepfs.format.ids import INTEGER_MAX, SEGMENT_STEPS, SegmentIndex, Step, Version
from stepfs.format.keys import (
    control_prefix,
    extent,
    index_prefix,
    log_prefix,
    new_lake_id,
    numbered,
    plans_prefix,
    snapshot_prefix,
    sources_prefix,
)
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import (
    SEGMENT_DIGEST_BYTES,
    LogState,
    ProducerState,
    Segment,
    StepEntry,
    encode_segment,
    encode_snapshot,
    genesis,
    pack_ref,
)
from stepfs.lake.control import Group
from stepfs.lake.fork import group_name
from stepfs.lake.identity import create_lake, open_lake, refuse_existing
from stepfs.lake.log.append import ownerless
from stepfs.lake.log.apply import rehearsed
from stepfs.lake.log.index import segment_bytes
from stepfs.lake.fork import producers_before
from stepfs.lake.log.reader import LogReader
from stepfs.lake.several import at_once, in_order
from stepfs.lake.slots import create_own
from stepfs.store.api import Entry, Store

_log = logging.getLogger("stepfs.lake.fork")

_FIRST_VERSION: Final = Version(1)  # floor 1: the origin commit is not taken for the start of a history
_RETIRE_S: Final = 30.0
_PAGE: Final = 1000
_SEGMENTS_AT_ONCE: Final = 4
NO_END: Final = Step(INTEGER_MAX)


@dataclass(frozen=True, slots=True)
class Cut:
    """The parent steps of a fork: those before `step`, then those from `step` on outside [skip_first, skip_end).

    None from `until` on.
    """

    step: Step
    skip_first: Step
    skip_end: Step
    until: Step = NO_END


def parent_steps(cut: Cut, first_live: Step, next_step: Step) -> list[range]:
    """Stretches of parent steps in the fork's order. `UsageError` if they do not fit the parent."""
    if not first_live <= cut.step <= next_step:
        raise UsageError(f"the fork point must be a live step: {first_live} to {next_step}, not {cut.step}")
    if not cut.step <= cut.skip_first <= cut.skip_end:
        raise UsageError(f"--skip {cut.skip_first}:{cut.skip_end} must lie at or after step {cut.step}")
    if cut.until < cut.step:
        raise UsageError(f"--until {cut.until} must lie at or after step {cut.step}")
    if next_step < cut.until < NO_END:
        raise UsageError(f"--until {cut.until}: the parent has {next_step} steps")
    end = min(cut.until, next_step)
    kept_until, kept_from = min(cut.skip_first, end), min(cut.skip_end, end)
    return [range(first_live, kept_until), range(kept_from, end)]


async def fork(
    parent: LogReader,
    store: Store,
    cut: Cut,
    clock: Clock,
    *,
    rewind: bool = False,
) -> LakeIdentity:
    """Create the lake `store` as a fork of `parent`. `RefusedError` if there is a lake already.

    `rewind`: producers stand as at `until`; errors of `producers_before`. If the parent was opened with `until_damage`, the
    fork has the steps before the damage.
    """
    await refuse_existing(store)
    # Report mistakes before anything is written.
    shared = parent_steps(cut, parent.first_live_step, parent.state.next_step)
    lake_id = new_lake_id()
    group = Group.on(parent.control, group_name(lake_id)) if any(shared) else None
    filled = False
    try:
        if group is not None:
            await group.register(store.url)
            await _look(parent)
            shared = parent_steps(cut, parent.first_live_step, parent.state.next_step)
        producers = await producers_before(parent, cut.until) if rewind else parent.state.producers
        await _write(parent, store, lake_id, cut, shared, producers, clock)
        if group is not None:
            await _check_held(group, store)
        filled = True
        identity = await create_lake(
            store,
            slices=parent.identity.grid,
            ext=parent.identity.ext,
            check_payload=parent.identity.check_payload,
            clock=clock,
            lake_id=lake_id,
        )
    except BaseException as error:
        # If the fork exists although the reply was lost, it needs the steps that the group holds.
        with trio.move_on_after(_RETIRE_S, shield=True), suppress(StepfsError):
            if not filled or (isinstance(error, RefusedError) and not await _exists(store, lake_id)):
                await _undo(store, lake_id, group)
        raise
    _name_others(parent, store, lake_id)
    return identity


async def _check_held(group: Group, store: Store) -> None:
    """The last look before the identity: the parent may have given up the steps of a group that is gone."""
    if await group.read() is None:
        raise RefusedError(f"{store.url}: the group of this fork was retired before it was complete; fork again")


async def _undo(store: Store, lake_id: str, group: Group | None) -> None:
    """Retire the group in the parent, then delete the objects that this process wrote, under an id that it drew."""
    if group is not None:
        with suppress(AbsentError):
            await group.retire()
    await store.delete([entry.key for entry in await store.list(f"{lake_id}/")])


def _name_others(parent: LogReader, store: Store, lake_id: str) -> None:
    """Say which groups of the parent belong to forks that were begun here before, and how to retire them."""
    for name, record in sorted(parent.control.groups.items()):
        if record.fork == store.url and name != group_name(lake_id):
            retire = command("stepfs", "checkpoint", parent.store.url, "--group", name, "--retire")
            _log.warning(
                "%s: an earlier fork to here, which was not completed or is gone, holds steps as group %s: %s",
                parent.store.url,
                name,
                retire,
            )


async def _look(parent: LogReader) -> None:
    """Follow the parent to its head. A damaged parent has no readable news, but its floor may move."""
    if parent.damage is None:
        await parent.refresh()
    if await parent.confirm():
        return
    if parent.damage is not None:
        raise RefusedError(f"{parent.store.url}: its log was reclaimed meanwhile; fork again")
    await parent.reopen()


async def _exists(store: Store, lake_id: str) -> bool:
    try:
        return (await open_lake(store)).lake_id == lake_id
    except AbsentError:
        return False


async def _write(
    parent: LogReader,
    store: Store,
    lake_id: str,
    cut: Cut,
    stretches: list[range],
    producers: Mapping[str, ProducerState],
    clock: Clock,
) -> None:
    """Write everything but the identity, which makes it a lake."""
    origin = Origin(
        url=parent.store.url,
        lake_id=parent.identity.lake_id,
        skip_first=cut.skip_first,
        skip_end=cut.skip_end,
        end=Step(parent.first_live_step + sum(map(len, stretches))),
    )
    state = await _fill(parent, store, lake_id, origin, stretches, producers, clock=clock)
    record = ControlRecord(
        record_id=entropy.token(RECORD_ID_BYTES),
        time_ms=state.time_ms,
        first_live_step=parent.first_live_step,
        floor=_FIRST_VERSION,
    )
    for number in range(2):  # without any, the placeholders would count as steps: one may be lost, or damaged
        await _create(store, numbered(control_prefix(lake_id), number), encode_control(lake_id, record))
    for prefix in (plans_prefix, sources_prefix):
        await _copy(parent.store, prefix(parent.identity.lake_id), store, prefix(lake_id))


async def _copy(parent: Store, old_prefix: str, store: Store, new_prefix: str) -> None:
    """The parent's plans, and its listings of their sources: a planned run goes on in the fork as it does there."""

    async def copy(entry: Entry) -> None:
        body = await parent.get(entry.key)
        if body is not None:
            await _create(store, new_prefix + entry.key.removeprefix(old_prefix), body)

    after = ""
    while page := await parent.list(old_prefix, after=after, limit=_PAGE):
        async with aclosing(in_order(page, copy, number=at_once(max(entry.size for entry in page)))) as copied:
            async for _ in copied:
                pass
        after = page[-1].key


class _Renumbered:
    """The parent's entries as the fork's: dense step numbers from `first` on, every object one origin further away."""

    def __init__(self, parent: LogReader, stretches: list[range]) -> None:
        self._parent = parent
        self._stretches = [stretch for stretch in stretches if stretch]
        self._first_live = Step(stretches[0].start)
        self.first = Step(self._first_live // SEGMENT_STEPS * SEGMENT_STEPS)  # so that segments stay whole
        self.end = Step(self._first_live + sum(map(len, stretches)))
        self.payload_bytes = 0  # of the entries that were asked for
        self.records = 0

    async def entries(self, steps: range) -> tuple[StepEntry, ...]:
        """Those below the first live one are placeholders for reclaimed steps, never shown nor read."""
        if not self._stretches:
            return tuple([await self._placeholder(step) for step in steps])
        found = []
        for step in steps:
            if step < self._first_live:
                found.append(await self._placeholder(step))
                continue
            entry = self._as_forked(await self._parent.entry(self._origin_of(step)), step)
            self.payload_bytes += entry.tgb.payload_bytes
            self.records += entry.tgb.records
            found.append(entry)
        return tuple(found)

    def _origin_of(self, step: int) -> Step:
        place = step - self._first_live
        for stretch in self._stretches:
            if place < len(stretch):
                return Step(stretch[place])
            place -= len(stretch)
        raise AssertionError(step)

    async def _placeholder(self, step: int) -> StepEntry:
        """Any entry will do, but the first live one may stand in a damaged segment that the fork leaves out."""
        if self._stretches:
            pattern = await self._parent.entry(Step(self._stretches[0].start))
        elif self._parent.state.tail:
            pattern = self._parent.state.tail[-1]
        else:
            pattern = await self._parent.entry(self._first_live)
        return self._as_forked(pattern, step)

    def _as_forked(self, entry: StepEntry, step: int) -> StepEntry:
        tgb = replace(entry.tgb, origin=entry.tgb.origin + 1)
        return replace(entry, step=Step(step), version=_FIRST_VERSION, tgb=tgb)


async def _fill(
    parent: LogReader,
    store: Store,
    lake_id: str,
    origin: Origin,
    stretches: list[range],
    producers: Mapping[str, ProducerState],
    *,
    clock: Clock,
) -> LogState:
    """Write the fork's segments, origin commit and snapshot; everything but the identity, which makes it a lake.

    Segments are written as they fill, a few at once, so that no history is too long for memory. They come before the
    commit, which has their totals, and carry the digest of the log's beginning.
    """
    entries, base = _Renumbered(parent, stretches), genesis(lake_id, parent.identity.slices)
    assert entries.end == origin.end
    full = range(entries.first // SEGMENT_STEPS, entries.end // SEGMENT_STEPS)

    async def write(index: int) -> bytes:
        steps = range(index * SEGMENT_STEPS, (index + 1) * SEGMENT_STEPS)
        segment = Segment(SegmentIndex(index), base.digest[:SEGMENT_DIGEST_BYTES], await entries.entries(steps))
        await _create(
            store, extent(index_prefix(lake_id), segment.index), encode_segment(lake_id, base.slices, segment)
        )
        return pack_ref(segment)

    number = min(_SEGMENTS_AT_ONCE, at_once(segment_bytes(base.slices)))
    async with aclosing(in_order(full, write, number=number)) as written:
        references = b"".join([reference async for _, reference in written])
    tail = await entries.entries(range(max(entries.first, full.stop * SEGMENT_STEPS), entries.end))
    head = replace(
        base,
        version=Version(_FIRST_VERSION - 1),
        next_step=origin.end,
        time_ms=parent.state.time_ms,
        total_bytes=entries.payload_bytes,
        total_records=entries.records,
    )
    commit = replace(ownerless(head, CommitKind.ORIGIN, clock), origin=origin)
    body = rehearsed(head, commit)
    state = replace(
        head,
        version=commit.version,
        digest=chain_digest(commit.prev_digest, body),
        time_ms=commit.time_ms,
        producers={name: replace(producer, version=commit.version) for name, producer in producers.items()},
        origins=(origin, *parent.state.origins),
        first_segment=SegmentIndex(full.start),
        segment_refs=references,
        tail=tail,
    )
    await _create(store, numbered(log_prefix(lake_id), commit.version), body)
    await _create(store, numbered(snapshot_prefix(lake_id), commit.version), encode_snapshot(state))
    return state


async def _create(store: Store, key: str, body: bytes) -> None:
    await create_own(store, key, body, "fork again, to the same or another URL")
