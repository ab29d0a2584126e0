"""Give memory back while the machine is short of it, rather than be killed; take it again when that is over.

The trainer beside us matters more than our cache. Shrinking is quick and in large steps, growing slow and only
after a calm time, so that two such programs on a node do not trade memory for ever.
"""

import logging
from collections.abc import Callable

import trio

from stepfs._internal.limits import MEMORY_BYTES_MIN, Memory, read_memory
from stepfs.data.slices import Slices
from stepfs.data.tuning import TUNING

_log = logging.getLogger("stepfs.data")


def is_tight(memory: Memory) -> bool:
    """Whether the kernel is about to reclaim memory that is in use."""
    reserve = min(memory.limit * TUNING.available_share_min, TUNING.available_bytes_enough)
    stalled = memory.stall_percent > TUNING.stall_percent_max and memory.available < 4 * reserve
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
            await trio.sleep(TUNING.pressure_poll_s)

    def _adjust(self, tight: bool, now: float) -> None:
        limit = self._slices.cache.pool.limit
        least = min(MEMORY_BYTES_MIN, self._full)
        if tight:
            self._calm_since = now
            # Shrink from the used bytes: a limit above them would free nothing.
            pool = self._slices.cache.pool
            target = max(least, int(min(limit, pool.used + pool.pooled) * TUNING.pressure_shrink))
            if target < limit:
                if limit == self._full:
                    _log.warning("memory is short on this machine: the cache shrinks until it is not")
                self._slices.set_memory(target)
        elif limit < self._full and now - self._calm_since >= TUNING.pressure_calm_s:
            self._slices.set_memory(min(self._full, int(limit * TUNING.pressure_grow)))
