"""The life of a slice in memory: one role at a time, and one table of transitions.

    WANTED    fetched, or to be fetched, for a reader that has not come; idle or consumed before, if it was requested again
    OPEN      just opened, or being read: its blocks stay
    PASSED    the same, but blocks that its reader had passed made room: it is fetched from its reader on
    IDLE      open without a reader (`cache.opened`): its blocks may go
    AWAITED   closed, and another reader is expected (`SliceReads.peers`)
    CONSUMED  closed, and no other reader is expected

A block that several slices share has the greatest of their roles; blocks of the least role leave memory first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class Role(enum.IntEnum):
    """How much a slice is needed, least first."""

    CONSUMED = 0
    IDLE = 1
    AWAITED = 2
    WANTED = 3
    PASSED = 4
    OPEN = 5

    @property
    def pinned(self) -> bool:
        """Whether the blocks stay in memory as long as anything else can leave it."""
        return self >= Role.PASSED


_CLOSED: Final = frozenset({Role.AWAITED, Role.CONSUMED})

NEXT: Final[Mapping[Role, frozenset[Role]]] = {
    Role.WANTED: _CLOSED | {Role.OPEN},
    Role.OPEN: _CLOSED | {Role.PASSED, Role.IDLE},
    Role.PASSED: _CLOSED | {Role.IDLE},
    Role.IDLE: _CLOSED | {Role.OPEN, Role.WANTED},
    Role.AWAITED: frozenset({Role.OPEN, Role.CONSUMED}),
    Role.CONSUMED: frozenset({Role.OPEN, Role.AWAITED, Role.WANTED}),
}
