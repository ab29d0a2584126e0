"""When a changed plan takes effect, and that the file of a running one was edited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio

from stepfs.errors import StepfsError
from stepfs.format.identity import LakeIdentity
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Store
from stepfs_producer.plan.file.digest import differences, normalised
from stepfs_producer.run.prepare import LocatedPlan, plan_file_at

LOOK_S: Final = 10.0
_CHANGES_MAX: Final = 3  # in one line
_MINUTE_MS: Final = 60_000


async def where_it_begins(store: Store, identity: LakeIdentity) -> str:
    """The line about a changed plan that was accepted: which step is its first, and when trainers are there."""
    log = await LogReader.open(store, identity)
    first, tail = log.state.next_step, log.state.tail
    begins = f"the changed plan makes the steps from {first} on"
    record = log.control.record
    standing = {name: group.need for name, group in (record.holding | record.paces).items() if not name.startswith(":")}
    if not standing:
        return begins
    name, step = max(standing.items(), key=lambda one: (one[1], one[0]))
    line = f"{begins}: group {name!r} is at step {step}, {max(first - step, 0)} before"
    took_ms = tail[-1].time_ms - tail[0].time_ms if tail else 0
    if first <= step or took_ms <= 0:
        return line
    minutes = (first - step) * took_ms / (len(tail) - 1) / _MINUTE_MS
    return f"{line}, about {max(round(minutes), 1)} min at the pace of the newest {len(tail)} steps"


async def say_edits(place: LocatedPlan, say: Callable[[str], None]) -> None:
    """Look at the plan's file as long as the run goes on: an edit changes nothing in it, and is said once."""
    if place.file is None:
        return
    said = seen = ""
    while True:
        await trio.sleep(LOOK_S)
        found = await trio.to_thread.run_sync(_edit, place, place.file, abandon_on_cancel=True)
        if found == seen and found != said:  # twice: the first time it may have been half written
            say(f"{place.file} {found or 'is the plan of this run again'}")
            said = found
        seen = found


def _edit(place: LocatedPlan, file: Path) -> str:
    goes_on = "this run goes on with the plan that it began"
    try:
        changes = differences(normalised(place.plan), normalised(plan_file_at(file, sources=False).plan))
    except StepfsError as error:
        return f"was edited, and is no plan now: {' '.join(str(error).splitlines()[:2])}; {goes_on}"
    if not changes:
        return ""
    more = f" and {len(changes) - _CHANGES_MAX} more" if len(changes) > _CHANGES_MAX else ""
    return (
        f"was edited: {'; '.join(changes[:_CHANGES_MAX])}{more}; {goes_on}: stop it and start it again with --accept-changes to "
        "take the new one"
    )
