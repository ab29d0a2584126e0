"""Detects a `max_lead` below the distance between two checkpoints: producers and trainer then wait for each other.

The sign: the need has not moved for long, and the mounts of the slowest group have read all committed steps, in two
checks in a row. Their records in the fleet view show that; without such records nothing is reported.
"""

from __future__ import annotations

from typing import Final

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.ids import Step
from stepfs.format.keys import component, nodes_prefix
from stepfs.format.node import decode_node
from stepfs.format.records import LakeIdentity
from stepfs.store.api import Store

FIRST_CHECK_S: Final = 60.0  # after a hold without progress; the next check after twice as long
CONFIRM_S: Final = 60.0  # the mounts of a large fleet write their records this rarely
_MOUNTS_MAX: Final = 8  # ranks of one group read in step: a few represent all
_RECORD_BYTES_MAX: Final = 1 << 16


class DeadlockCheck:
    """Checks at growing intervals while a producer is held back."""

    def __init__(self, store: Store, identity: LakeIdentity) -> None:
        self._store = store
        self._identity = identity
        self._next_s = FIRST_CHECK_S
        self._read_all: Step | None = None  # of the previous check, if everything was read then

    def reset(self) -> None:
        """Start over: the need or the producer has moved."""
        self._next_s = FIRST_CHECK_S
        self._read_all = None

    async def found(self, group: str, held_s: float, committed: Step) -> bool:
        """Whether two checks in a row found everything read. `held_s`: the seconds without progress."""
        if held_s < self._next_s:
            return False
        before, self._read_all = self._read_all, await self._read_to(group, committed)
        self._next_s = held_s + (held_s if self._read_all is None else CONFIRM_S)
        return before is not None and before == self._read_all

    async def _read_to(self, group: str, committed: Step) -> Step | None:
        """One past the newest step that the group's mounts have opened, if no committed step is left to them."""
        prefix = f"{nodes_prefix(self._identity.lake_id)}{component(group)}/"
        read_to, known = Step(0), committed
        for entry in await self._store.list(prefix, limit=_MOUNTS_MAX):
            try:
                data = await self._store.get(entry.key, bytes_max=_RECORD_BYTES_MAX)
                lake_id, record = decode_node(data or b"", entry.key)
            except (CorruptError, NewerFormatError):
                continue  # or removed since the LIST
            if lake_id == self._identity.lake_id:
                read_to, known = max(read_to, record.read_to), max(known, record.next_step)
        return read_to if read_to >= known else None
