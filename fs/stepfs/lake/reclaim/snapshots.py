"""How much of the log a reclaim must keep: two snapshots that can be read, and every commit from the older one on.

Then the lake survives one damaged object: readers and producers start from the older snapshot and read on
(lake/log/snapshots.py). A lake whose log still begins at version 0 needs no second snapshot.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Final

from stepfs.errors import CorruptError
from stepfs.format.ids import Version
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import confirmed_snapshots, write_snapshot

_KEPT: Final = 2


async def ensure_snapshots(reader: LogReader, lowest: Version) -> Version:
    """Ensure a snapshot at `lowest` or later. Returns the new floor: at most `lowest`, and no higher than the second
    newest snapshot that the log confirms. The log never begins between two snapshots of which one is damaged.
    """
    found = await _confirmed(reader)
    if _is_one_missing(reader, found, lowest):
        await write_snapshot(reader.store, reader.identity, reader.state, reader.segments, reader.control)
        found = await _confirmed(reader)
    if not found and reader.control.floor > 0:
        raise CorruptError(f"{reader.store.url}: no readable snapshot is left; nothing was deleted")
    return _floor_over(reader, found, lowest)


async def planned_floor(reader: LogReader, lowest: Version) -> Version:
    """The floor that `ensure_snapshots` would return. Writes nothing."""
    found = await _confirmed(reader)
    if _is_one_missing(reader, found, lowest):
        found = [reader.state.version, *found][:_KEPT]
    return _floor_over(reader, found, lowest)


def _is_one_missing(reader: LogReader, found: list[Version], lowest: Version) -> bool:
    alone = len(found) < _KEPT and reader.control.floor > 0  # one is damaged
    return not found or found[0] < lowest or (alone and found[0] < reader.state.version)


def _floor_over(reader: LogReader, found: list[Version], lowest: Version) -> Version:
    if len(found) < _KEPT:
        return reader.control.floor
    return max(reader.control.floor, min(lowest, found[-1]))


async def _confirmed(reader: LogReader) -> list[Version]:
    """Versions of the newest confirmed snapshots, newest first, at most `_KEPT`."""
    found: list[Version] = []
    async with aclosing(confirmed_snapshots(reader.store, reader.identity, at_most=reader.state.version)) as states:
        async for state in states:
            found.append(state.version)
            if len(found) == _KEPT:
                break
    return found
