"""The log as a reclaimer follows it: confirmed at the moment of use, and with little in memory."""

from __future__ import annotations

from typing import Final

from stepfs.format.records import LakeIdentity
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Store

_SEGMENT_BYTES_MAX: Final = 8 << 20  # it moves through the lake once and does not read a segment again


async def opened(store: Store, identity: LakeIdentity) -> LogReader:
    """A reader that keeps few segments."""
    reader = await LogReader.open(store, identity)
    reader.segments.limit(_SEGMENT_BYTES_MAX)
    return reader


async def refreshed(reader: LogReader) -> LogReader:
    """The same reader, moved to the head and the newest floor record: two requests when neither moved."""
    await reader.refresh()
    if not await reader.confirm():
        await reader.reopen()
    return reader
