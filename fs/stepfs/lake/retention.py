"""Which checkpoints a group keeps: pure decisions from one record to the next, free of I/O and clocks.

"The K newest" means the K recorded last. After a roll-back these are not the K greatest: a trainer that kept 90 and
100, went back to 40 and then saves 50 must not lose 50, nor what it resumed from. So a record holds the order of
recording, and `keep` counts only among checkpoints at or below the one that is recorded: the greater ones belong to
the branch that was left, hold back nothing that is not held back anyway, and leave once the trainer has passed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from stepfs.format.ids import Step
from stepfs.format.records import ConsumerRecord

Order = tuple[Step, ...]  # kept checkpoints in the order of recording


def with_order(record: ConsumerRecord, order: Order) -> ConsumerRecord:
    """The record with these kept checkpoints, recorded in this order."""
    kept = tuple(sorted(order))
    assert len(set(kept)) == len(kept)
    return replace(record, kept=kept, recorded=() if order == kept else order)


def add(order: Order, step: Step, keep: int | None) -> Order:
    """`step` is recorded. With `keep`, so many of the newest at or below it stay, `step` among them."""
    assert keep is None or keep >= 1
    grown = (*_without(order, {step}), step)
    if keep is None:
        return grown
    passed = [kept for kept in grown if kept <= step]
    return _without(grown, passed[:-keep])


def resume(order: Order, step: Step) -> Order:
    """Training goes on from `step`: nothing is dropped, and whatever is greater counts as older than the rest."""
    left = tuple(kept for kept in order if kept > step)
    return (*left, *_without(order, {*left, step}), step)


def set_to(order: Order, kept: Iterable[Step]) -> Order:
    """Exactly `kept`: those known already in their order, then the new ones in ascending order."""
    wanted = set(kept)
    return (*(step for step in order if step in wanted), *sorted(wanted - set(order)))


def surviving(record: ConsumerRecord, first_live: Step) -> ConsumerRecord:
    """The record without what was reclaimed before anybody saw it there; the same object if nothing was.

    Its writer died between its record and its look at the floor, so nobody was promised these steps. A group that
    keeps nothing then needs every live step.
    """
    if record.retired or record.need >= first_live:
        return record
    rest = with_order(record, tuple(step for step in record.order if step >= first_live))
    return replace(rest, start=max(record.start, first_live))


def equal(one: ConsumerRecord, other: ConsumerRecord) -> bool:
    """Whether two records of a group say the same; each has an id and a time of its own."""
    return replace(one, record_id=other.record_id, time_ms=other.time_ms) == other


def _without(order: Sequence[Step], gone: Iterable[Step]) -> Order:
    leaves = set(gone)
    return tuple(step for step in order if step not in leaves)
