"""The record that each change makes of the newest control record: pure, and the only place that decides.

`decide(number, record, request)` is the next record, or None when the newest says it already; a refusal is an exception. The
transitions are those of tests/t1_protocol/model/control.pml, by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, ClassVar

from stepfs.errors import AbsentError, NoSuchGroupError, UsageError, WithdrawnError
from stepfs.format.control import KEPT_CHECKPOINTS_MAX, MINIMA_MAX, ControlRecord, GroupRecord
from stepfs.format.identity import PACE_GROUP
from stepfs.format.ids import Step, Version

Order = tuple[Step, ...]  # kept checkpoints in the order of recording


def add_to_order(order: Order, step: Step, keep: int | None) -> Order:
    """The order after `step` was recorded. With `keep`, the `keep` newest at or below it stay, `step` among them."""
    assert keep is None or keep >= 1
    grown = (*_without(order, {step}), step)
    if keep is None:
        return grown
    passed = [kept for kept in grown if kept <= step]
    return _without(grown, passed[:-keep])


def resume_order(order: Order, step: Step) -> Order:
    """The order after training resumed from `step`: nothing is dropped; greater checkpoints count as older than the
    rest.
    """
    left = tuple(kept for kept in order if kept > step)
    return (*left, *_without(order, {*left, step}), step)


def set_order(order: Order, kept: Iterable[Step]) -> Order:
    """Exactly `kept`: known checkpoints in their present order, then the new ones in ascending order."""
    wanted = set(kept)
    return (*(step for step in order if step in wanted), *sorted(wanted - set(order)))


def _without(order: Sequence[Step], gone: Iterable[Step]) -> Order:
    leaves = set(gone)
    return tuple(step for step in order if step not in leaves)


@dataclass(frozen=True, slots=True)
class Register:
    """Make the group exist; a new one needs every live step. `fork`: the URL of the fork that will hold it. `replica`: that of
    the replica that holds it from now on, as `fork` says.
    """

    group: str
    fork: str = ""
    replica: str = ""
    fences: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Add:
    """Keep the checkpoint at `next_step`; with `keep`, only the last `keep` recorded ones at or below it."""

    group: str
    next_step: Step
    keep: int | None = None
    creates: bool = True  # else the group must exist
    fences: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Resume:
    """Keep the checkpoint at `next_step`, from which training goes on; greater ones count as older than the rest."""

    group: str
    next_step: Step
    creates: bool = True
    fences: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Drop:
    """Keep the checkpoint at `next_step` no more."""

    group: str
    next_step: Step
    fences: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Revise:
    """Keep `change(kept)` in place of `kept`.

    Unless it `revives`, the request leaves a group alone that is not there.
    """

    group: str
    change: Callable[[frozenset[Step]], frozenset[Step]]
    revives: bool = True
    fences: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Pace:
    """The run is at `next_step`, which may be a lower one than before: producers keep near it, and nothing is held."""

    group: str  # with `PACE_GROUP`
    next_step: Step
    creates: bool = True  # else the run must have a group, or a pace
    fences: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Retire:
    """The group needs nothing any more: it leaves the record, with its pace."""

    group: str
    fences: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Advance:
    """Give up the steps below `first_live` and the log versions below `floor`, if nobody needed them within the grace.

    `deleted_bytes`: payload bytes of all steps below `first_live`. `ages_s`: see `least_need`.
    """

    first_live: Step
    floor: Version
    deleted_bytes: int
    ages_s: Mapping[int, float] = field(default_factory=dict)
    grace_s: float = 0.0
    fences: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class AskForPause:
    """Ask the other writers of the log to pause; not again if somebody asked since the `known` number of requests."""

    known: int
    fences: ClassVar[bool] = False


Changes = Drop | Retire  # of a group that must exist
Request = Register | Add | Resume | Revise | Pace | Changes | Advance | AskForPause


def decide(number: int, record: ControlRecord, request: Request) -> ControlRecord | None:
    """The next record's contents; None: the newest says it already.

    `WithdrawnError`: steps that the request needs are reclaimed. `AbsentError`: no such group, or checkpoint.
    `UsageError`: too many checkpoints.
    """
    if isinstance(request, Advance):
        return _advance(number, record, request)
    if isinstance(request, AskForPause):
        asked = record.pauses_asked
        return None if asked > request.known else successor(number, record, pauses_asked=asked + 1)
    old = record.groups.get(request.group)
    pace = PACE_GROUP + request.group
    run = request.group.removeprefix(PACE_GROUP)
    if isinstance(request, Pace) and old is None and not request.creates and run not in record.groups:
        raise _no_group(run, record)
    if isinstance(request, Retire) and old is None and pace in record.groups:
        old = record.groups[pace]
    if old is None and (isinstance(request, Changes) or (isinstance(request, Add | Resume) and not request.creates)):
        raise _no_group(request.group, record)
    if isinstance(request, Changes):
        assert old is not None
        new = _changed(old, request)
    else:
        new = _joined(old or GroupRecord(start=record.first_live_step), old is None, request)
    if new == old:
        return None
    leaving = {request.group, pace} if new is None else {request.group}
    groups = {name: group for name, group in record.groups.items() if name not in leaving}
    if new is not None:
        _check(record, request.group, old, new)
        groups[request.group] = new
    return successor(number, record, groups=groups)


def _joined(group: GroupRecord, is_new: bool, request: Register | Add | Resume | Revise | Pace) -> GroupRecord | None:
    """The group after a request that makes it exist."""
    match request:
        case Pace(next_step=step):
            return replace(group, start=step, kept=(step,), recorded=())
        case Register(fork=fork, replica=replica):
            return replace(group, fork=fork, replica=replica) if is_new or replica else group
        case Add(next_step=step, keep=keep):
            return _with_order(group, add_to_order(group.order, step, keep))
        case Resume(next_step=step):
            return _with_order(group, resume_order(group.order, step))
        case Revise(change=change, revives=revives):
            if is_new and not revives:
                return None
            kept = change(frozenset(group.kept))
            if kept != frozenset(group.kept):
                group = _with_order(group, set_order(group.order, kept))
            return group


def _no_group(name: str, record: ControlRecord) -> NoSuchGroupError:
    near = get_close_matches(name, record.holding, n=3)
    others = f"do you mean {' or '.join(map(repr, near))}?" if near else "`stepfs status` shows all"
    return NoSuchGroupError(f"there is no group {name!r}: never registered, or retired; {others}")


def _changed(group: GroupRecord, request: Changes) -> GroupRecord | None:
    """The group after a request to one that must exist."""
    name = request.group
    match request:
        case Drop(next_step=step):
            if step not in group.kept:
                raise AbsentError(f"group {name!r} keeps no checkpoint with next step {step}")
            return _with_order(group, set_order(group.order, frozenset(group.kept) - {step}))
        case Retire():
            return None


def _with_order(group: GroupRecord, order: Order) -> GroupRecord:
    """The group with these checkpoints in the order of recording. One that keeps none any more needs what it did."""
    kept = tuple(sorted(order))
    start = group.start if kept else group.need
    return replace(group, kept=kept, recorded=() if order == kept else order, start=start)


def _check(record: ControlRecord, name: str, old: GroupRecord | None, new: GroupRecord) -> None:
    if name.startswith(PACE_GROUP):
        return
    late = frozenset(step for step in new.kept if step < record.first_live_step)
    if late:
        raise WithdrawnError(
            f"group {name!r}: steps from {min(late)} on are needed, but those below {record.first_live_step} are reclaimed; "
            "nothing was recorded. Resume from a later checkpoint, or start a new lake",
            late,
        )
    if len(new.kept) > max(KEPT_CHECKPOINTS_MAX, len(old.kept) if old else 0):
        raise UsageError(
            f"group {name!r} would keep {len(new.kept)} checkpoints, at most {KEPT_CHECKPOINTS_MAX} can be recorded; drop "
            "old ones (--keep), or delete them"
        )


def _advance(number: int, record: ControlRecord, request: Advance) -> ControlRecord | None:
    """None if a group needs more, or did within the grace: a need that ended after the ages were read counts as new."""
    if request.first_live > min(record.need, least_need(record, request.ages_s, request.grace_s)):
        return None
    if request.first_live <= record.first_live_step:
        return None
    return successor(
        number,
        record,
        first_live_step=request.first_live,
        floor=max(request.floor, record.floor),
        deleted_bytes=max(request.deleted_bytes, record.deleted_bytes),
    )


def successor(number: int, record: ControlRecord, **changes: Any) -> ControlRecord:
    """Record `number + 1`: `record`, which is record `number`, with these fields changed."""
    after = replace(record, **changes)
    need = after.need
    rising: list[tuple[int, Step]] = []
    for ended, least in record.minima or ((number + 1, record.need),):
        counts = max(least, after.first_live_step)
        if rising and rising[-1][1] == counts:
            rising.pop()
        if counts < need:
            rising.append((ended, counts))
    while len(rising) >= MINIMA_MAX:
        # Without a reclaimer they pile up. The oldest two as one: the lower need counts for as long as the higher one.
        rising[:2] = [(rising[1][0], rising[0][1])]
    return replace(after, minima=(*rising, (number + 2, need)))


def least_need(record: ControlRecord, ages_s: Mapping[int, float], grace_s: float) -> Step:
    """The least need of all records that were the newest within `grace_s`: nothing below it may go.

    `ages_s`: of the records that ended one of the minima, by the store's clock; one that is missing is new.
    """
    *former, (_, need) = record.minima or ((0, record.need),)
    for ended, least in former:
        if ages_s.get(ended, 0.0) < grace_s:
            return least
    return need
