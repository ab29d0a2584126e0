"""What may go: pure decisions over the log's state, the groups and what a LIST found.

The rule for data objects needs no clock. A producer's steps are in the order of its seq, so below its *watermark*
(one past the last seq it has below the first live step) nothing is live. Above it an object is an orphan only if it
can never be committed any more (older epoch, or seq already committed) and no live step names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stepfs.errors import RefusedError
from stepfs.floor import Floor
from stepfs.format.ids import Step
from stepfs.format.keys import component, parse_data_key
from stepfs.format.records import ConsumerRecord
from stepfs.format.snapshot import LogState, StepEntry
from stepfs.store.api import Entry


@dataclass(frozen=True, slots=True)
class Need:
    """Which step the lake as a whole still needs; `step` None when nothing may be reclaimed, `reason` says why."""

    step: Step | None
    reason: str


def furthest_need(groups: Mapping[str, ConsumerRecord]) -> Step:
    """The greatest need over live groups; 0 when there is none."""
    return max((group.need for group in groups.values() if not group.retired), default=Step(0))


def least_need(groups: Mapping[str, ConsumerRecord], floor: Floor, next_step: Step) -> Need:
    """The least need over live groups. `RefusedError` when a group needs what is gone."""
    live = [group for group in groups.values() if not group.retired]
    if not live:
        return Need(None, "no group has registered: every step may still be needed")
    for group in live:
        # A need between first_live_step and closing is kept: its writer takes the announcement back, and our own records
        # end it as well. Only what is gone cannot be had.
        if group.need < floor.first_live_step:
            raise RefusedError(
                f"group {group.group!r} needs step {group.need}, but steps below {floor.first_live_step} were reclaimed "
                "before it said so; raise its checkpoint or `stepfs checkpoint --group … --retire` it"
            )
    holder = min(live, key=lambda group: group.need)
    if holder.need > next_step:
        raise RefusedError(
            f"group {holder.group!r} says it has consumed up to step {holder.need}, but only {next_step} are "
            "committed; is that checkpoint from another lake?"
        )
    return Need(holder.need, f"group {holder.group!r} needs step {holder.need}")


def watermarks(dead: Iterable[StepEntry]) -> dict[str, int]:
    """Per producer component: one past the greatest seq among steps that are no longer live."""
    marks: dict[str, int] = {}
    for entry in dead:
        if entry.tgb.origin == 0:
            name = component(entry.producer_id)
            marks[name] = max(marks.get(name, 0), entry.tgb.seq + 1)
    return marks


@dataclass(frozen=True, slots=True)
class Sorted:
    """Listed data objects: certainly dead, and those that only the live steps' descriptors can tell from orphans."""

    dead: tuple[Entry, ...]
    candidates: tuple[Entry, ...]


def sort_objects(objects: Iterable[Entry], marks: Mapping[str, int], state: LogState) -> Sorted:
    """Sort what was listed under data/ *after* `state` was read. Objects that may yet be committed are in neither."""
    producers = {component(producer.producer_id): producer for producer in state.producers.values()}
    dead: list[Entry] = []
    candidates: list[Entry] = []
    for entry in objects:
        name = parse_data_key(entry.key)
        producer = producers.get(name.producer) if name is not None else None
        if name is None or producer is None:
            continue
        if name.seq < marks.get(name.producer, 0):
            dead.append(entry)
        elif name.epoch < producer.epoch or name.seq < producer.next_seq:
            candidates.append(entry)
    return Sorted(tuple(dead), tuple(candidates))
