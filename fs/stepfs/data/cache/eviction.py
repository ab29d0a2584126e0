"""The order of eviction from memory: consumed blocks first (oldest first), then idle ones, then those reached last.

Awaited blocks were read by one reader and will be by another that is behind. Evict the newest awaited block first. If the
lagging reader's backlog does not fit, this keeps the part it reaches first.

It contains a block iff it is READY and unpinned. Steps ahead are grouped by step, so that finding the farthest one
costs the number of steps held, not of blocks.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from stepfs.data.blocks import Block
from stepfs.data.cache.reading_order import Distance, ReadingOrder
from stepfs.data.roles import Role
from stepfs.format.ids import Step

_REOPENED: Final = 4  # blocks read last


class EvictionOrder:
    """The order in which unpinned blocks may go."""

    def __init__(self) -> None:
        self.order = ReadingOrder()  # of the steps ahead
        self._aside: dict[Role, OrderedDict[Block, None]] = {  # oldest first
            Role.CONSUMED: OrderedDict(),
            Role.IDLE: OrderedDict(),
            Role.AWAITED: OrderedDict(),
        }
        self.awaited_bytes = 0
        self._ahead: dict[Step, dict[Block, None]] = {}

    def add(self, block: Block) -> None:
        """File a block by its role, as the newest of it."""
        self.discard(block)
        role = block.role
        if role is Role.WANTED:
            self._ahead.setdefault(block.step, {})[block] = None
        else:
            self._aside[role][block] = None
            self.awaited_bytes += block.range.size if role is Role.AWAITED else 0

    def discard(self, block: Block) -> None:
        for role, filed in self._aside.items():
            if block in filed:
                del filed[block]
                self.awaited_bytes -= block.range.size if role is Role.AWAITED else 0
        blocks = self._ahead.get(block.step)
        if blocks is not None:
            blocks.pop(block, None)
            if not blocks:
                del self._ahead[block.step]

    def pop_unneeded(self) -> Block | None:
        """The oldest consumed block (in an announced order the newest), else the one that is idle for longest."""
        consumed = self._aside[Role.CONSUMED]
        if self.order.announced and len(consumed) > _REOPENED:
            # An epoch reads again last what it has just read; but a loader may open a file twice in a row.
            return self._take(next(itertools.islice(reversed(consumed), _REOPENED, None)))
        for role in (Role.CONSUMED, Role.IDLE):
            if self._aside[role]:
                return self._aside[role].popitem(last=False)[0]
        return None

    def pop_awaited(self, bytes_max: float) -> Block | None:
        """The awaited block that is reached last, if they are more than `bytes_max`."""
        if self.awaited_bytes <= bytes_max:
            return None
        return self._take(next(reversed(self._aside[Role.AWAITED])))

    def pop_spent(self) -> Block | None:
        """The oldest consumed or idle block, else one of the lowest step if readers have passed over it."""
        unneeded = self.pop_unneeded()
        if unneeded is not None or not self._ahead:
            return unneeded
        step = min(self._ahead)
        return self._take(next(iter(self._ahead[step]))) if self.order.passed(step) else None

    def pop_copied(self, copied: Callable[[Block], bool], *, beyond: Distance) -> Block | None:
        """The farthest block beyond a distance that can be loaded from disk again."""
        if self._farthest(beyond) is None:
            return None
        for step in sorted(self._ahead, key=self.order.distance, reverse=True):
            if self.order.distance(step) <= beyond:
                return None
            for block in self._ahead[step]:
                if copied(block):
                    return self._take(block)
        return None

    def pop_farthest(self, *, beyond: Distance | None = None) -> Block | None:
        """A block of the farthest step, if that is beyond a distance."""
        step = self._farthest(beyond)
        return None if step is None else self._take(next(reversed(self._ahead[step])))

    def _farthest(self, beyond: Distance | None) -> Step | None:
        step = self.order.farthest(self._ahead)
        near = step is None or (beyond is not None and self.order.distance(step) <= beyond)
        return None if near else step

    def _take(self, block: Block) -> Block:
        self.discard(block)
        return block
