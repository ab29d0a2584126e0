"""The group `fork:<lake id>` by which a fork keeps alive in its parent what it shares with it.

It is registered with the fork's URL before anything is written there. Only the fork at that URL moves it on, and in the
end retires it: a copy of the fork has the same id, and what it releases the fork itself may still need. So the group of a
fork that was killed while it was made, moved or deleted holds for ever, and an operator retires it: nothing in the lake
tells such a fork from one that is slow. Rejected: undoing it from here, by names that anybody may have put on record.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from typing import Final

from stepfs.clock import Clock
from stepfs.errors import AbsentError, command
from stepfs.lake.control import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores

_log = logging.getLogger("stepfs.lake.fork")

_NAME: Final = re.compile(r"fork:[0-9a-f]{32}")


def group_name(child_lake_id: str) -> str:
    return f"fork:{child_lake_id}"


def is_fork_group(name: str) -> bool:
    """Whether a group is a fork's: it keeps data, and no trainer behind it moves on."""
    return _NAME.fullmatch(name) is not None


async def group_in_parent(reader: LogReader, origins: OriginStores, clock: Clock | None = None) -> Group | None:
    """The group of a fork in its parent; None if this lake is no fork, or if the parent was deleted as a whole: then
    `stepfs verify` reports the lost steps.

    Only in the nearest origin: that lake itself holds the data that it shares with its own parent, as long as we hold it.
    """
    for parent in reader.state.origins[:1]:
        with suppress(AbsentError):
            store = origins.open(parent)
            identity = await open_lake(store)
            if identity.lake_id == parent.lake_id:
                return Group.of(store, identity, group_name(reader.identity.lake_id), clock)
    return None


async def release_origins(reader: LogReader, origins: OriginStores, clock: Clock) -> None:
    """Advance, and in the end retire, the group of this lake in the lake it was forked from."""
    group = await group_in_parent(reader, origins, clock)
    if group is None:
        return
    parent, record = reader.state.origins[0], await group.read()
    need = parent.parent_step(reader.first_live_step) if reader.first_live_step < parent.end else None

    def by_hand(*arguments: object) -> str:
        return command("stepfs", "checkpoint", parent.url, "--group", group.name, *arguments)

    if record is None:
        if need is not None:
            _log.warning("%s holds the steps of this fork no more, and may reclaim them: %s", parent.url, by_hand(need))
    elif need is not None and need <= record.need:
        return
    elif record.fork != reader.store.url:
        _log.warning(
            "%s: %s holds what this fork shares for %s, and nothing is released from here; if nobody else needs it: %s",
            reader.store.url,
            parent.url,
            f"the fork at {record.fork}" if record.fork else "whoever recorded its group by hand",
            by_hand("--retire") if need is None else by_hand(need, "--keep", 1),
        )
    elif need is None:
        with suppress(AbsentError):  # another reclaimer, or an operator, has retired it: it is not brought back
            await group.retire()
    else:
        await group.revise(lambda kept: kept if min(kept, default=need) > need else frozenset({need}), revives=False)
