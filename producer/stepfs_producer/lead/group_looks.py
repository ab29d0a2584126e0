"""The needs of the consumer groups, read once for all producers of a process.

A look costs one LIST and a GET per group; a hundred producers held back by one trainer would all send these requests.
Each producer keeps its own interval, in its own thread and on its own clock, and remembers the number of its last
look: if another producer has published a newer one, it takes that. So no result is older than the producer's own
pause, and no producer has to be woken.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Final

from stepfs.format.ids import Step
from stepfs.format.records import LakeIdentity
from stepfs.lake.floor import Floor
from stepfs.lake.group_records import list_groups
from stepfs.store.api import Store


@dataclass(frozen=True, slots=True)
class SlowestGroup:
    """The live group with the least need."""

    name: str | None
    need: Step


_NO_GROUP: Final = SlowestGroup(None, Step(0))


class _Board:
    """The newest look at one lake's groups by this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.claimed = -1  # a producer is making the look after this number
        self.slowest = _NO_GROUP


_boards: weakref.WeakValueDictionary[str, _Board] = weakref.WeakValueDictionary()
_boards_lock = threading.Lock()


class GroupLooks:
    """One producer's access to the looks of its process."""

    def __init__(self, store: Store, identity: LakeIdentity) -> None:
        self._store = store
        self._identity = identity
        self._floor = Floor(store, identity)  # kept: it lists retired groups, which need not be read
        with _boards_lock:
            self._board = _boards.setdefault(identity.lake_id, _Board())
        self._taken = self._board.number  # looks published before our start may be of any age
        self._deferred = False

    async def next(self) -> SlowestGroup | None:
        """A look newer than the last one taken. None if another producer is making one now: call again shortly.

        None is never returned twice in a row, so no producer depends on one that died. Raises the store's errors.
        """
        board = self._board
        with board.lock:
            if board.number > self._taken:
                return self._take()
            if board.claimed == board.number and not self._deferred:
                self._deferred = True
                return None
            claimed = board.claimed = board.number
        try:
            groups = await list_groups(self._store, self._identity, self._floor)
        finally:
            with board.lock:
                if board.claimed == claimed:
                    board.claimed = -1
        live = [group for group in groups.values() if not group.retired]
        slowest = min(live, key=lambda group: group.need, default=None)
        with board.lock:
            board.slowest = SlowestGroup(slowest.group, slowest.need) if slowest is not None else _NO_GROUP
            board.number += 1
            return self._take()

    def _take(self) -> SlowestGroup:
        self._taken = self._board.number
        self._deferred = False
        return self._board.slowest
