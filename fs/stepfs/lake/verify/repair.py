"""`verify --repair`: a record after a damaged newest control record, from the one before and the objects in the store; and
log versions that were lost or rot, from the commits that carry them.

A reclaimer that knew the record and still deletes goes on: stop the reclaimers before a repair.
"""

from contextlib import aclosing, suppress
from dataclasses import replace

from stepfs.errors import CorruptError, ReclaimedError, RefusedError
from stepfs.format.commit import chain_digest, decode_commit
from stepfs.format.control import ControlRecord, GroupRecord
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import FIRST_STEP, SEGMENT_STEPS, SegmentIndex, Step, Version
from stepfs.format.keys import data_prefix, log_prefix, numbered
from stepfs.lake.concurrency import in_order, pages
from stepfs.lake.control import Control
from stepfs.lake.create_once import create_own, listed_slots
from stepfs.lake.decisions import successor
from stepfs.lake.fork import group_in_parent
from stepfs.lake.log.apply import read_commit
from stepfs.lake.log.carriers import carriers_of, unfolded
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import confirmed_snapshots
from stepfs.lake.origins import OriginStores
from stepfs.store.api import Store


async def repair_control(store: Store, identity: LakeIdentity, origins: OriginStores) -> str | None:
    """Continue the control sequence after a damaged newest record. Returns the result in words; None: it is sound.

    `origins`: a fork asks its parent for the steps that it still holds there.
    """
    control = Control(store, identity)
    with suppress(CorruptError):
        await control.refresh()
        return None
    damaged, number, before = await control.last_readable()
    faster = RefusedError(f"{store.url}: another process wrote a control record meanwhile; run `stepfs verify` again")
    if number == damaged:  # it wrote that one
        raise faster
    base = replace(before, floor=max(before.floor, await _first_version(store, identity)))
    control.assume(damaged, base)
    reader = await LogReader.open(store, identity, control=control, until_damage=True)
    if control.number != damaged:  # opening the log has found it
        raise faster
    is_next = number == damaged - 1
    end = Step(min(base.need if is_next else reader.state.next_step, reader.state.next_step))
    try:
        first_live = await _first_complete_step(reader, base, end)
        first_live = max(first_live, await _first_held_step(reader, origins, end))
        live_bytes = await _live_bytes(reader, first_live)
    except ReclaimedError:  # by an advance after a record that another process wrote
        raise faster from None
    groups = {name: _clipped(group, first_live) for name, group in base.groups.items()}
    deleted_bytes = max(base.deleted_bytes, reader.state.total_bytes - live_bytes)
    given_up = replace(base, first_live_step=first_live, deleted_bytes=deleted_bytes, groups=groups)
    repaired = successor(damaged, given_up)
    if first_live < repaired.need:  # any change may be lost: a reclaimer's grace begins anew
        repaired = replace(repaired, minima=((damaged + 1, first_live), (damaged + 2, repaired.need)))
    if not await control.take(damaged + 1, repaired):
        raise faster
    lost = f"record {damaged} is" if is_next else f"records {number + 1} to {damaged} are"
    return (
        f"control {lost} damaged; record {damaged + 1} continues the one before: steps from {first_live} on, groups "
        f"{', '.join(sorted(groups)) or 'none'}. If a group changed there, record that again (`stepfs checkpoint`)"
    )


async def repair_log(store: Store, identity: LakeIdentity) -> list[str]:
    """Put log versions back that are missing or cannot be read, byte for byte as the digests say. Returns what was done.

    `StoreUnreachableError` if the store does not take one.
    """
    control = Control(store, identity)
    await control.refresh(lenient=True)
    control.check_may_write()
    prefix, lake_id = log_prefix(identity.lake_id), identity.lake_id
    listed = await listed_slots(store, prefix, after=control.floor - 1)
    damaged: dict[Version, bool] = {}  # newest last → whether an object is there
    versions = [Version(number) for number in range(control.floor, max(listed, default=-1) + 1)]
    async with aclosing(in_order([numbered(prefix, version) for version in versions], store.get)) as bodies:
        places = iter(versions)
        async for key, body in bodies:
            version = next(places)
            try:
                if body is None or decode_commit(body, key).version != version:
                    damaged[version] = body is not None
            except CorruptError:
                damaged[version] = True
    done = []
    for version, is_there in reversed(damaged.items()):  # each is proved by the one behind it
        body = await _carried(store, lake_id, version)
        if body is None:
            continue
        key = numbered(prefix, version)
        if is_there:
            await store.put(key, [body])
        else:
            await create_own(store, key, body, "run it again")
        done.append(f"log version {version} {'could not be read' if is_there else 'was missing'}: it is as it was")
    return done


async def _carried(store: Store, lake_id: str, version: Version) -> bytes | None:
    """The bytes of a version by a commit that carries it, if the version behind it, which can be read, continues them."""
    with suppress(CorruptError):
        following = await read_commit(store, lake_id, Version(version + 1))
        if following is None:
            return None
        for carrier in carriers_of(version):
            with suppress(CorruptError):
                found = await read_commit(store, lake_id, Version(carrier))
                for commit, body in unfolded(*found, version - 1) if found is not None else ():
                    if commit.version == version and chain_digest(commit.prev_digest, body) == following[0].prev_digest:
                        return body
    return None


async def _first_version(store: Store, identity: LakeIdentity) -> Version:
    """The version at which the log begins that leads to the snapshots. A slot further down was deleted, and taken again by a
    writer that slept.
    """
    listed = await listed_slots(store, log_prefix(identity.lake_id))
    async with aclosing(confirmed_snapshots(store, identity)) as states:
        first = min([state.version async for state in states], default=min(listed, default=0))
    while first - 1 in listed:
        first -= 1
    return Version(first)


def _clipped(group: GroupRecord, first_live: Step) -> GroupRecord:
    """The group without the checkpoints whose steps are gone."""
    if group.need >= first_live:
        return group
    order = tuple(step for step in group.order if step >= first_live)
    kept = tuple(sorted(order))
    start = max(group.start if kept else group.need, first_live)
    return replace(group, start=start, kept=kept, recorded=() if order == kept else order)


async def _first_held_step(reader: LogReader, origins: OriginStores, end: Step) -> Step:
    """The first step before `end` that this lake, a fork, has not released in its parent, or `end`."""
    group = await group_in_parent(reader, origins)
    if group is None:
        return FIRST_STEP
    parent, held = reader.state.origins[0], await group.read()
    for number in range(min(parent.end, end)):
        if held is not None and parent.parent_step(Step(number)) >= held.need:
            return Step(number)
    return Step(min(parent.end, end))


async def _live_bytes(reader: LogReader, first_live: Step) -> int:
    """Payload bytes of the steps from `first_live` on. What cannot be read counts as given up: else it would hold producers
    with a `max_live_bytes` for ever.
    """
    live = sum(entry.tgb.payload_bytes for entry in reader.state.tail if entry.step >= first_live)
    for number in range(first_live // SEGMENT_STEPS, reader.state.sealed_segments):
        with suppress(CorruptError):
            segment = await reader.load_segment(SegmentIndex(number))
            live += sum(entry.tgb.payload_bytes for entry in segment.entries if entry.step >= first_live)
    return live


async def _first_complete_step(reader: LogReader, base: ControlRecord, end: Step) -> Step:
    """The step after the last one before `end` that a reclaim may have deleted."""
    prefix = data_prefix(reader.identity.lake_id)
    present: set[str] = set()
    async with aclosing(pages(reader.store, prefix)) as listed:
        async for page in listed:
            present |= {entry.key for entry in page}
    # A snapshot names no segment without a live step.
    first = step = max(base.first_live_step, Step(reader.state.first_segment * SEGMENT_STEPS))
    begun: set[str] = set()  # producers of which something is left: a reclaim deletes their steps in order
    while step < end:
        segment_end = Step(min((step // SEGMENT_STEPS + 1) * SEGMENT_STEPS, end))
        try:
            entries = [await reader.entry(Step(number)) for number in range(step, segment_end)]
        except CorruptError:
            if step < base.need or first == step:
                first = segment_end  # the reclaim has deleted the segment too
            entries = []
        for entry in entries:
            if entry.tgb.origin:
                continue  # none of the fork's own objects: `_first_held_step`
            if entry.tgb.key in present:
                begun.add(entry.producer_id)
            elif entry.step < base.need or entry.producer_id not in begun:
                first = Step(entry.step + 1)
        step = segment_end
    return first
