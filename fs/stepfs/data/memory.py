"""Give memory back while the machine is short of it, rather than be killed; take it again when that is over.

The trainer beside us matters more than our cache. Shrinking is quick and in large steps, growing slow and only
after a calm time, so that two such programs on a node do not trade memory for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from stepfs.data.slices import Slices
from stepfs.limits import MEMORY_BYTES_MIN, Memory, read_memory

_log = logging.getLogger("stepfs.data")
_POLL_S: Final = 1.0
_CALM_S: Final = 30.0
_SHRINK: Final = 0.7
_GROW: Final = 1.1
_AVAILABLE_SHARE_MIN: Final = 0.05  # of the limit
_AVAILABLE_BYTES_ENOUGH: Final = 4 << 30  # on large machines 5 % is a lot
_STALL_PERCENT_MAX: Final = 20.0


def is_tight(memory: Memory) -> bool:
    """Whether the kernel is about to reclaim memory that is in use."""
    reserve = min(memory.limit * _AVAILABLE_SHARE_MIN, _AVAILABLE_BYTES_ENOUGH)
    stalled = memory.stall_percent > _STALL_PERCENT_MAX and memory.available < 4 * reserve
    return memory.available < reserve or stalled


class MemoryGovernor:
    """Moves the budget between `MEMORY_BYTES_MIN` and the configured one."""

    def __init__(self, slices: Slices, read: Callable[[], Memory] = read_memory) -> None:
        self._slices = slices
        self._read = read
        self._full = slices.cache.pool.limit
        self._calm_since = float("-inf")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            self._adjust(is_tight(self._read()), trio.current_time())
            await trio.sleep(_POLL_S)

    def _adjust(self, tight: bool, now: float) -> None:
        limit = self._slices.cache.pool.limit
        least = min(MEMORY_BYTES_MIN, self._full)
        if tight:
            self._calm_since = now
            # Shrink from the used bytes: a limit above them would free nothing.
            pool = self._slices.cache.pool
            target = max(least, int(min(limit, pool.used + pool.pooled) * _SHRINK))
            if target < limit:
                if limit == self._full:
                    _log.warning("memory is short on this machine: the cache shrinks until it is not")
                self._slices.set_memory(target)
        elif limit < self._full and now - self._calm_since >= _CALM_S:
            self._slices.set_memory(min(self._full, int(limit * _GROW)))
