"""Recording a durable checkpoint, by the lake's URL or through a mount of it: the one entry for all callers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfs.control_files import read_config
from stepfs.errors import UsageError
from stepfs.format.control import GroupRecord
from stepfs.format.ids import Step
from stepfs.lake.groups import Group
from stepfs.lake.log.reader import LogReader


@dataclass(frozen=True, slots=True)
class MountedLake:
    """The lake that a mount shows, from its daemon."""

    lake: str
    endpoint_url: str | None
    group: str | None


def mounted_lake(directory: Path) -> MountedLake:
    """`AbsentError` if the directory is not a stepfs mount; other errors as `read_control_file`."""
    options: Any = read_config(directory)["options"]
    return MountedLake(options["lake"], options["endpoint_url"], options["group"])


async def record_checkpoint(
    log: LogReader,
    group: str,
    next_step: int,
    *,
    keep: int | None = None,
    drop: bool = False,
    resumed: bool = False,
) -> GroupRecord:
    """Record for `group` a durable checkpoint that resumes at `next_step`; with `drop` its deletion; with `resumed`
    that training continues from it. `keep` belongs to the first of these.

    Refuses a step that no reader can have consumed yet: the lake would delete unread steps.
    """
    assert not (drop and resumed)
    check_next_step(next_step, log.state.next_step)
    run = Group.on(log.control, group)
    if drop:
        return await run.drop(Step(next_step))
    if resumed:
        return await run.resumed(Step(next_step))
    return await run.add(Step(next_step), keep=keep)


def check_next_step(next_step: int, committed: int) -> None:
    """`UsageError` for a step beyond the one to be committed next."""
    if not 0 <= next_step <= committed:
        raise UsageError(
            f"NEXT {next_step}: only {committed} steps are committed; is the checkpoint from another lake, "
            "or is its counter not in steps?"
        )
