"""The commands that repair the damage that `verify` found: pure, from the names of the objects."""

from __future__ import annotations

from collections.abc import Iterable

from stepfs.command_hint import command
from stepfs.format.ids import SEGMENT_STEPS
from stepfs.format.keys import (
    LAKE,
    control_prefix,
    index_prefix,
    log_prefix,
    segment_of,
    snapshot_prefix,
)
from stepfs.lake.verify.lake import STRAY, Damage


def advice(
    url: str,
    lake_id: str | None,
    damages: Iterable[Damage],
    *,
    opens: bool,
    has_beginning: bool,
    live: range,
    control_reads: bool,
) -> list[str]:
    """One line per action, commands whole and quoted for a shell.

    `control_reads`: whether the newest control record can be read. `opens`: whether a reader reaches the head of the log.
    `has_beginning`: whether it at least finds a state to start from, which a fork needs, too. `live`: the steps that a
    reader shows.
    """
    if lake_id is None:
        return [f"restore {LAKE} from a backup: without it nobody knows where the lake's objects are"]
    lines, damages = [], list(damages)
    keys = [damage.key for damage in damages]

    def under(prefix: str) -> list[str]:
        return [key for key in keys if key.startswith(prefix)]

    if not control_reads:
        lines.append(
            "stop every `stepfs reclaim`, and continue the record before the lake's newest control record, which is damaged "
            f"(until then nothing is deleted, and no group changes): {command('stepfs', 'verify', url, '--repair')}"
        )
    strays = {damage.key for damage in damages if damage.problem == STRAY}
    lines += [f"delete {url}/{key}" for key in sorted(strays)]
    if control_reads and set(under(control_prefix(lake_id))) - strays:
        lines.append("only the newest control record is read, and it is sound: nothing to do")
    if not opens and not has_beginning and control_reads:
        lines.append(
            "restore the newest object under snapshot/ from a backup: nothing that can be read says what was before the log"
        )
    elif not opens and (under(log_prefix(lake_id)) or control_reads):
        lines.append(
            f"a new lake with all that comes before the damage: {command('stepfs', 'fork', url, 'NEW', '--until-damage')}"
        )
    if opens and under(log_prefix(lake_id)):
        lines.append("commits that a snapshot covers are not needed to read the lake: nothing to do")
    if opens and under(snapshot_prefix(lake_id)):
        lines.append("readers and producers start from another snapshot: nothing to do")
    lines += _around(url, _lost_steps(lake_id, damages, live), live) if opens else []
    return lines


def is_passed(lake_id: str | None, damage: Damage) -> bool:
    """Whether it is of a control record. While the newest is sound, the others are never read, and never go."""
    return lake_id is not None and damage.key.startswith(control_prefix(lake_id))


def _lost_steps(lake_id: str, damages: Iterable[Damage], live: range) -> list[int]:
    """Live steps whose data, or whose descriptors, are damaged."""
    lost: set[int] = {damage.step for damage in damages if damage.step is not None}
    for damage in damages:
        segment = (
            segment_of(index_prefix(lake_id), damage.key) if damage.key.startswith(index_prefix(lake_id)) else None
        )
        if segment is not None:
            lost |= set(range(segment * SEGMENT_STEPS, (segment + 1) * SEGMENT_STEPS))
    return sorted(step for step in lost if step in live)


def _around(url: str, lost: list[int], live: range) -> list[str]:
    """The fork that leaves out the first run of lost steps; further runs need further forks, one after another."""
    if not lost:
        return []
    first = end = lost[0]
    while end in set(lost):
        end += 1
    skipped = f"{first}:{end}" if end < live.stop else f"{first}:"
    more = sum(step >= end for step in lost)
    rest = f" ({more} more are damaged: verify NEW, and fork that)" if more else ""
    what = f"restore the objects, or make a new lake without steps {first} to {end - 1}{rest}"
    return [f"{what}: {command('stepfs', 'fork', f'{url}@{first}', 'NEW', '--skip', skipped)}"]
