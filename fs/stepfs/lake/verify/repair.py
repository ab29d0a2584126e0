"""`verify --repair`: a record after a damaged newest control record, from the one before and what the store shows.

The damaged record was one change. If a group changed, that change is lost, and is reported. If a reclaimer gave steps up,
it may have deleted some: their data or their log versions are gone, and nothing up to the last of them can be promised.
It gave up nothing that the groups of the record before needed, so a loss beyond that is no reclaim. No reclaim may run
meanwhile: one that has read the damaged record while it was sound would delete what is found here (control.pml, mutant 11).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.control import ControlRecord
from stepfs.format.ids import SEGMENT_STEPS, Step, Version
from stepfs.format.keys import data_prefix, log_prefix, number_of
from stepfs.format.records import LakeIdentity
from stepfs.lake.control import Control
from stepfs.lake.decisions import successor
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Store

_PAGE: Final = 1000


async def repair_control(store: Store, identity: LakeIdentity) -> str | None:
    """Continue the control sequence after a damaged newest record. Returns the result in words; None: it is sound."""
    control = Control(store, identity)
    with suppress(CorruptError):
        await control.refresh()
        return None
    damaged, before = await control.last_readable()
    first_listed = await store.list(log_prefix(identity.lake_id), limit=1)
    lowest = number_of(log_prefix(identity.lake_id), first_listed[0].key) if first_listed else None
    base = replace(before, floor=max(before.floor, Version(lowest or 0)))
    control.assume(damaged, base)
    first_live = await _first_complete_step(await LogReader.open(store, identity, control=control), base)
    repaired = successor(damaged, replace(base, first_live_step=first_live))
    if first_live < repaired.need:  # whatever the lost change was: a reclaimer's grace begins anew
        repaired = replace(repaired, minima=((damaged + 1, first_live), (damaged + 2, repaired.need)))
    if not await control.take(
        damaged + 1, repaired
    ):  # no later one: opening the log may have found new records
        raise RefusedError(
            f"{store.url}: another process wrote a control record meanwhile; run `stepfs verify` again"
        )
    return (
        f"control record {damaged} is damaged; record {damaged + 1} continues the one before: steps from {first_live} on, "
        f"groups {', '.join(sorted(repaired.groups)) or 'none'}. If a group changed in record {damaged}, record that again "
        "(`stepfs checkpoint`)"
    )


async def _first_complete_step(reader: LogReader, base: ControlRecord) -> Step:
    """The step after the last one that a reclaim may have deleted."""
    prefix = data_prefix(reader.identity.lake_id)
    present: set[str] = set()
    after = ""
    while page := await reader.store.list(prefix, after=after, limit=_PAGE):
        present |= {entry.key for entry in page}
        after = page[-1].key
    named = Step(
        reader.state.first_segment * SEGMENT_STEPS
    )  # a snapshot names no segment without a live step
    first = step = max(base.first_live_step, named)
    end = min(base.need, reader.state.next_step)
    while step < end:
        segment_end = Step(min((step // SEGMENT_STEPS + 1) * SEGMENT_STEPS, end))
        try:
            entries = [await reader.entry(Step(number)) for number in range(step, segment_end)]
        except CorruptError:
            first = segment_end  # the reclaim has deleted the segment too
        else:
            gone = [entry.step for entry in entries if entry.tgb.origin == 0 and entry.tgb.key not in present]
            first = Step(gone[-1] + 1) if gone else first
        step = segment_end
    return first
