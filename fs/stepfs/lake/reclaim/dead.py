"""Facts about the steps below a first live one, from a few objects however many these steps are."""

from __future__ import annotations

from contextlib import aclosing
from typing import Final

from stepfs.format.commit import CommitKind
from stepfs.format.ids import SEGMENT_STEPS, Epoch, SegmentIndex, Step, Version
from stepfs.format.keys import component
from stepfs.format.snapshot import LogState
from stepfs.lake.log.apply import read_commit
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import confirmed_snapshots
from stepfs.lake.reclaim.sweep import LastDead, last_dead, live_entries

_FEW_PRODUCERS: Final = 64  # each costs a LIST, whether it has dead steps or not


async def payload_bytes_below(reader: LogReader, first_live: Step) -> int:
    """Payload bytes of all steps below `first_live`: the commit that has it counts them, with those of a fork's parent."""
    if first_live >= reader.state.next_step:
        return reader.state.total_bytes
    found = await read_commit(reader.store, reader.identity.lake_id, (await reader.entry(first_live)).version)
    if found is not None and found[0].kind is CommitKind.DATA:
        commit, _ = found
        return commit.total_bytes - sum(tgb.payload_bytes for tgb in commit.tgbs[first_live - commit.first_step :])
    control = reader.control  # of a fork's parent, or below a replica's beginning: no commit of this log has it
    deleted = control.record.deleted_bytes
    async with aclosing(live_entries(reader, control.first_live_step, first_live)) as parts:
        async for part in parts:
            deleted += sum(entry.tgb.payload_bytes for entry in part)
    return deleted


async def last_dead_steps(reader: LogReader, first_live: Step) -> LastDead | None:
    """Each producer's last step below `first_live`, from the newest snapshot that ends below it and what lies in between.

    None where no such snapshot is left, or where it names so many producers that reading the dead steps costs less.
    """
    state = reader.state
    cut = state.version
    if first_live < state.next_step:
        cut = Version((await reader.entry(first_live)).version - 1)
    base = await _newest_snapshot(reader, cut)
    if base is None or len(base.producers) > max(_FEW_PRODUCERS, base.sealed_segments):
        return None
    last: LastDead = {
        component(producer.producer_id): (Epoch(producer.epoch), producer.next_seq - 1)
        for producer in base.producers.values()
        if producer.next_seq
    }
    for number in range(base.next_step // SEGMENT_STEPS, min(first_live // SEGMENT_STEPS + 1, state.sealed_segments)):
        # One that is gone was deleted by another reclaimer, after the data that it names.
        segment = await reader.segments.load_unreferenced(SegmentIndex(number))
        if segment is not None:
            last_dead((entry for entry in segment.entries if entry.step < first_live), last)
    last_dead((entry for entry in state.tail if entry.step < first_live), last)
    return last


async def _newest_snapshot(reader: LogReader, at_most: Version) -> LogState | None:
    async with aclosing(confirmed_snapshots(reader.store, reader.identity, at_most=at_most)) as states:
        async for state in states:
            return state
    return None
