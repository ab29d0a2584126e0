"""Which objects may be deleted: pure decisions over the log's state, the groups and the result of a LIST.

The rules for data objects need no clock. The objects of one producer are named by epoch and seq, and its steps are in
the order of both, in the log as in a LIST. So every object up to its last step below the first live one is either dead
or can never be committed any more: that range of names is deleted without reading the live steps. Above it an object
is an *orphan* only if it can never be committed (older epoch, seq already committed, sealed lake) and no live step
names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stepfs.format.ids import Epoch, Step, Version
from stepfs.format.keys import DataName, component, data_name
from stepfs.format.snapshot import LogState, ProducerState, StepEntry


@dataclass(frozen=True, slots=True)
class Target:
    """The live part of a lake: the steps from `first_live` on, the log versions from `floor` on."""

    first_live: Step
    floor: Version


def last_dead(dead: Iterable[StepEntry], into: dict[str, tuple[Epoch, int]]) -> None:
    """Per producer component: epoch and seq of its last step among `dead`, which come in the order of steps."""
    for entry in dead:
        if entry.tgb.origin == 0:
            name = component(entry.producer_id)
            into[name] = max(into.get(name, (Epoch(0), -1)), (entry.epoch, entry.tgb.seq))


def is_below(name: DataName, last: Mapping[str, tuple[Epoch, int]]) -> bool:
    """Whether the name lies at or before its producer's last dead step."""
    return (name.epoch, name.seq) <= last.get(name.producer, (Epoch(0), -1))


def can_never_be_committed(name: DataName, producer: ProducerState | None, *, sealed: bool) -> bool:
    """As of a confirmed state that was read *before* the object was listed."""
    if sealed:
        return True
    return producer is not None and (name.epoch < producer.epoch or name.seq < producer.next_seq)


def ended_incarnations(before: LogState, after: LogState) -> dict[str, tuple[str, str]]:
    """The names under which the uploads of incarnations lie that ended between two states: producer component →
    (after this name, before that name).

    An incarnation's uploads have the seqs that were not committed before it; those of older ones were seen before.
    """
    found = {}
    for name, producer in after.producers.items():
        known = before.producers.get(name)
        epoch, seq = (known.epoch, known.next_seq) if known else (Epoch(0), 0)
        if producer.epoch > epoch or (after.sealed and not before.sealed):
            end = Epoch(producer.epoch + 1) if after.sealed else producer.epoch
            found[component(name)] = data_name(epoch, seq), data_name(end, 0)
    return found
