"""The first step that the lake still needs, with the grace that a reclaimer grants.

A mistake (a wrong number, a group retired too early) can be corrected for `grace`: the least need of that time counts. The
control record carries the minima of the need (`lake/decisions.py`), and one LIST gives the ages of the records that ended
them, by the store's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stepfs.errors import RefusedError
from stepfs.format.control import ControlRecord
from stepfs.format.ids import Step
from stepfs.format.keys import control_prefix
from stepfs.lake.control import Control
from stepfs.lake.decisions import least_need
from stepfs.lake.slots import listed_slots

_TIMELESS: Final = " (0 s by the store's clock; a store that sends no Date says so for ever: use --grace 0)"


@dataclass(frozen=True, slots=True)
class Need:
    """The first step that the lake as a whole still needs. `step` None: nothing may be reclaimed. `reason`: why."""

    step: Step | None
    reason: str


async def ages_of_minima(control: Control, grace_s: float) -> dict[int, float]:
    """Ages in s of the records that ended one of the minima; without a request if there is only the present need."""
    former = [ended for ended, _ in control.record.minima[:-1]]
    if not former or grace_s <= 0:
        return dict.fromkeys(former, grace_s)
    prefix = control_prefix(control.identity.lake_id)
    listed = await listed_slots(control.store, prefix, after=former[0] - 1, ages=True)
    # A record that vanished is older than those after it.
    return {ended: max((entry.age_s for n, entry in listed.items() if n >= ended), default=0.0) for ended in former}


def needed(record: ControlRecord, ages_s: Mapping[int, float], grace_s: float, next_step: Step) -> Need:
    """`RefusedError` when every group claims to have consumed steps that were never committed."""
    if not record.groups:
        return Need(None, "no group is registered: every step may still be needed")
    step = least_need(record, ages_s, grace_s)
    if step < record.need:
        timeless = "" if any(ages_s.values()) else _TIMELESS
        reason = f"step {step} was needed less than {_duration(grace_s)} ago{timeless}"
    else:
        name = min(record.groups, key=lambda group: record.groups[group].need)
        reason = f"group {name!r} needs step {step}"
    if step > next_step:
        raise RefusedError(f"{reason}, but only {next_step} are committed; is that checkpoint from another lake?")
    return Need(step, reason)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"
