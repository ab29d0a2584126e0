"""Recording a durable checkpoint, by the lake's URL or through a mount of it: the one entry for all callers."""

import re
from pathlib import Path
from typing import Any, Final

from stepfs._internal.control_files import read_status
from stepfs.errors import OtherHistoryError, RefusedError, UsageError
from stepfs.format.control import GroupRecord
from stepfs.format.identity import FORK_GROUP, check_id
from stepfs.format.ids import Step
from stepfs.lake.control import Control, Group

_OF_FORK: Final = re.compile(rf"{FORK_GROUP}[0-9a-f]{{32}}")


async def record_checkpoint(
    control: Control,
    committed: int,
    group: str,
    next_step: int,
    *,
    keep: int | None = None,
    drop: bool = False,
    resumed: bool = False,
    creates: bool = True,
    by_hand: bool = False,
    pace: bool = False,
) -> GroupRecord:
    """Record for `group` a durable checkpoint that resumes at `next_step`; with `drop` its deletion; with `resumed`
    that training continues from it. `keep` belongs to the first of these. `NoSuchGroupError` for a group that is not
    there, unless it `creates` one. `by_hand`: an operator may move what a fork holds, and drop what a replica does.

    Refuses a step beyond the `committed` ones, which no reader can have consumed yet: the lake would delete unread steps.
    """
    assert not (drop and resumed)
    check_next_step(next_step, committed)
    if pace:
        if control.identity.replica_of:
            raise UsageError(
                f"a replica has no producers; record the pace in the lake itself, {control.identity.replica_of}"
            )
        return await Group.on(control, group).paces(Step(next_step), creates=creates)
    held = by_hand and (drop or _OF_FORK.fullmatch(group) is not None)
    run = Group(control, check_id(group, "group")) if held else Group.on(control, group)
    if drop:
        return await run.drop(Step(next_step))
    if resumed:
        return await run.resumed(Step(next_step), creates=creates)
    return await run.add(Step(next_step), keep=keep, creates=creates)


def check_on_mount(next_step: int, directory: Path) -> int:
    """The number of committed steps that the mount knows. `RefusedError` for a checkpoint in the middle of a shuffled
    epoch of its readers, which would release steps of that epoch; `OtherHistoryError` if the mount shows steps that the lake
    has lost; other errors as `read_control_file`.
    """
    status: Any = read_status(directory)
    store = status["store"]
    if store["reachable"] and store["trouble"] and not store.get("upgrade_needed"):
        raise OtherHistoryError(f"{directory}: {store['trouble']}")
    why = breaks_order(next_step, status["order_needs_from"])
    if why:
        raise RefusedError(why)
    return int(status["next_step"])


def check_next_step(next_step: int, committed: int) -> None:
    """`UsageError` for a step beyond the one to be committed next."""
    if not 0 <= next_step <= committed:
        raise UsageError(
            f"NEXT {next_step}: only {committed} steps are committed; is the checkpoint from another lake, "
            "or is its counter not in steps?"
        )


def breaks_order(step: int, needed: int | None) -> str:
    """Why a checkpoint inside a shuffled epoch that needs its steps from `needed` on is not recorded; '' if it may be."""
    if needed is None or step <= needed:
        return ""
    return (
        f"NEXT {step}: readers go through the steps from {needed} on in a shuffled order, and a checkpoint in the middle of "
        f"it needs all of them: record {needed} (`ShuffledSteps.next_step`) until the epoch has ended. An order that "
        "nobody follows any more is taken back with `ShuffledSteps.set_epoch`, or on a mount with "
        "`stepfs.announce.announce_none(DIR)`"
    )
