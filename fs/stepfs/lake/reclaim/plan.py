"""Which objects may be deleted: pure decisions over the log's state, the groups and the result of a LIST.

The rules for data objects need no clock. The objects of one producer are named by epoch and seq, and its steps are in
the order of both, in the log as in a LIST. So every object up to its last step below the first live one is either dead
or can never be committed any more: that range of names is deleted without reading the live steps. Above it an object
is an *orphan* only if it can never be committed (older epoch, seq already committed, sealed lake) and no live step
names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stepfs.errors import RefusedError
from stepfs.format.ids import Epoch, Step, Version
from stepfs.format.keys import DataName, component
from stepfs.format.records import ConsumerRecord
from stepfs.format.snapshot import LogState, ProducerState, StepEntry
from stepfs.lake.floor import Floor

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS


@dataclass(frozen=True, slots=True)
class Target:
    """The live part of a lake: the steps from `first_live` on, the log versions from `floor` on."""

    first_live: Step
    floor: Version


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """The known facts about one group at one moment."""

    directory: str
    slot: int  # of its newest record
    newest: ConsumerRecord | None  # None: retired, according to the floor record
    earlier: tuple[ConsumerRecord, ...]  # superseded, but by a record that is younger than grace
    began: bool  # its first record is younger than grace
    unknown: bool  # another record that still counts was trimmed
    settled: bool  # its newest record is older than grace

    @property
    def live(self) -> bool:
        return self.newest is not None and not self.newest.retired

    @property
    def steady(self) -> bool:
        """Live now and for all of the grace before."""
        return self.live and not self.began and not any(record.retired for record in self.earlier)


@dataclass(frozen=True, slots=True)
class Need:
    """The first step that the lake as a whole still needs. `step` None: nothing may be reclaimed. `reason`: why."""

    step: Step | None
    reason: str


def furthest_need(groups: Iterable[GroupEvidence]) -> Step:
    """The greatest need over live groups; 0 when there is none."""
    return max((g.newest.need for g in groups if g.newest is not None and g.live), default=Step(0))


def holds_back(groups: Sequence[GroupEvidence], to: Step) -> bool:
    """Whether a group needs a step below `to`, or may have needed one within grace."""
    need = _least(groups, Step(0), grace_s=0.0)
    return need.step is None or need.step < to


def least_need(
    groups: Sequence[GroupEvidence], floor: Floor, next_step: Step, *, grace_s: float = 0.0
) -> Need:
    """The least step that any group needs, or needed within grace.

    `RefusedError` when every group claims to have consumed steps that were never committed.
    """
    need = _least(groups, floor.first_live_step, grace_s=grace_s)
    if need.step is not None and need.step > next_step:
        raise RefusedError(
            f"{need.reason}, but only {next_step} are committed; is that checkpoint from another lake?"
        )
    return need


def _least(groups: Sequence[GroupEvidence], first_live: Step, *, grace_s: float) -> Need:
    claims: list[Need] = []
    for group in groups:
        if group.newest is not None and group.live:
            claims.append(_claim(group.newest, first_live))
        claims += [
            Need(
                Step(max(record.need, first_live)),
                f"group {record.group!r} needed step {record.need} less than {_duration(grace_s)} ago",
            )
            for record in group.earlier
            if not record.retired
        ]
    for group in groups:
        if group.unknown:
            name = group.newest.group if group.newest is not None else group.directory
            return Need(
                None,
                f"group {name!r} changed less than {_duration(grace_s)} ago, and what it needed before is not on record "
                "any more",
            )
    if not claims:
        return Need(None, "no group has registered: every step may still be needed")
    if not any(group.steady for group in groups):
        return Need(
            None,
            f"no group has been there for {_duration(grace_s)}: before that every step may still be needed",
        )
    return min(claims, key=lambda claim: claim.step or 0)


def _claim(record: ConsumerRecord, first_live: Step) -> Need:
    """The need of the newest record of a live group.

    A need between first_live_step and closing is honoured: its writer withdraws the announcement, and our own records
    end it as well. A need of deleted steps comes from a writer that has not read the floor since then, and may never
    read it. That record guarantees it nothing, but the record before may guarantee it any live step. So all live steps
    stay.
    """
    if record.need >= first_live:
        return Need(record.need, f"group {record.group!r} needs step {record.need}")
    return Need(
        first_live,
        f"group {record.group!r} needs step {record.need}, but steps below {first_live} were reclaimed before it said so: "
        "nothing more goes until it resumes from a later checkpoint, drops this one (`stepfs checkpoint … --drop`) or is "
        "retired (`--retire`)",
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"


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


def epochs(state: LogState) -> int:
    """A number that grows whenever uploads may have become orphans: a producer started or retired, the lake was
    sealed."""
    return sum(producer.epoch for producer in state.producers.values()) + state.sealed


def orphans_due(state: LogState, floor: Floor, now_ms: int, *, fresh: bool) -> bool:
    """Whether to look through all of data/ for orphans: it costs O(live).

    Leftovers of dead producers among committed steps are deleted with these steps. A search is due when new orphans
    are possible (at most every hour in one process; `fresh`: its first run), and once a day for uploads that arrived
    late.
    """
    if not epochs(state):
        return False
    record = floor.record
    if record is None or not record.swept_epochs:
        return True
    since_ms = abs(now_ms - record.swept_ms)  # the wall clock decides only when to search again
    return since_ms >= _DAY_MS or (epochs(state) != record.swept_epochs and (fresh or since_ms >= _HOUR_MS))
