"""A fork releases its parent's steps: the group that it holds there follows the fork's own first live step."""

from __future__ import annotations

import logging
from contextlib import suppress

from stepfs.clock import Clock
from stepfs.command_hint import command
from stepfs.errors import AbsentError
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.unfinished_fork import group_in_parent

_log = logging.getLogger("stepfs.lake.reclaim")


async def release_origins(reader: LogReader, origins: OriginStores, clock: Clock) -> None:
    """Advance, and in the end retire, the group of this lake in the lake it was forked from."""
    group = await group_in_parent(reader, origins, clock)
    if group is None:
        return
    parent, record = reader.state.origins[0], await group.read()
    if record is None:
        if reader.first_live_step < parent.end:
            need = parent.parent_step(reader.first_live_step)
            again = command("stepfs", "checkpoint", parent.url, "--group", group.name, need)
            _log.warning("%s holds the steps of this fork no more, and may reclaim them: %s", parent.url, again)
        return
    # Another reclaimer, or an operator, may retire the group meanwhile: it is not brought back.
    if reader.first_live_step >= parent.end:
        with suppress(AbsentError):
            await group.retire()
        return
    need = parent.parent_step(reader.first_live_step)
    if need > record.need:
        await group.revise(lambda kept: kept if min(kept, default=need) > need else frozenset({need}), revives=False)
