"""Writing snapshots in the background: they never delay commits, and never two run at once.

Only a Committed state is written (hazard 11). If a snapshot is not written, because this process ends or the store is
unreachable, the producer that commits across the next boundary makes up for it; nothing depends on this one.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from stepfs.errors import StepfsError
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import LogState
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import snapshot_due, write_snapshot
from stepfs.store.api import Store
from stepfs_producer.commit import Committed

_log = logging.getLogger("stepfs.producer")

SETTLE_S_MAX: Final = 30.0


class SnapshotWriter:
    """Writes at most one snapshot at a time; the newest requested state is next."""

    def __init__(self, store: Store, identity: LakeIdentity, reader: LogReader) -> None:
        self._store = store
        self._identity = identity
        self._reader = reader
        self._wanted: LogState | None = None
        self._writing = False
        self._changed = trio.lowlevel.ParkingLot()

    def note(self, committed: Committed) -> None:
        """Note one of our commits; some make the next snapshot ours to write."""
        if snapshot_due(committed.before, committed.after):
            self._wanted = committed.after
            self._changed.unpark_all()

    async def run(self) -> None:
        while True:
            while self._wanted is None:
                await self._changed.park()
            state, self._wanted, self._writing = self._wanted, None, True
            try:
                reader = self._reader
                await write_snapshot(self._store, self._identity, state, reader.segments, reader.control)
            except StepfsError as error:
                _log.warning("snapshot of version %d not written, a later one will be: %s", state.version, error)
            finally:
                self._writing = False
                self._changed.unpark_all()

    async def settled(self) -> None:
        """Wait, for a bounded time, for the snapshot under way: a producer that leaves at once would never write
        one."""
        with trio.move_on_after(SETTLE_S_MAX):
            while self._wanted is not None or self._writing:
                await self._changed.park()
