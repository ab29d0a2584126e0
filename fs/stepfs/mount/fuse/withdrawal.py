"""Steps that leave the view: their names go from the kernel, their bytes from memory.

Only names, and only from a worker thread: invalidating data with a READ in flight deadlocks the daemon, and a
notification from the loop's thread can wait for a lock whose holder waits for the loop. Dropping a step directory's
name drops everything below it; files that are open stay readable.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Final

import pyfuse3
import trio

from stepfs.format.ids import Step
from stepfs.mount.fuse.lookup_counts import KnownSteps
from stepfs.mount.fuse.meter import Meter
from stepfs.mount.protocols import Slices
from stepfs.view.inodes import Fixed
from stepfs.view.naming import step_name
from stepfs.view.tree import Tree

_log = logging.getLogger("stepfs.mount")

_BATCH: Final = 512

Invalidate = Callable[[int, bytes], None]


class Withdrawal:
    """Follows `Tree.first_visible` upwards."""

    def __init__(
        self,
        tree: Tree,
        known: KnownSteps,
        slices: Slices,
        meter: Meter,
        *,
        invalidate: Invalidate = pyfuse3.invalidate_entry,
    ) -> None:
        self._tree = tree
        self._known = known
        self._slices = slices
        self._meter = meter
        self._invalidate = invalidate
        self._noted = tree.first_visible()
        self._wake = trio.Event()

    def note(self) -> None:
        """The view may have changed. Never waits."""
        first = self._tree.first_visible()
        if first > self._noted:
            self._slices.forget_below(first)
            self._wake.set()
        self._noted = first  # it falls when a group rolls back to an older checkpoint

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Withdraw names until cancelled; a batch that was begun is finished."""
        task_status.started()
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            names = (step_name(step) for step in self._known.between(Step(0), self._noted))
            while batch := list(itertools.islice(names, _BATCH)):
                await trio.to_thread.run_sync(self._withdraw, batch)
                self._meter.steps_invalidated += len(batch)

    def _withdraw(self, names: list[bytes]) -> None:
        for name in names:
            try:
                self._invalidate(Fixed.ROOT, name)
            except FileNotFoundError:
                pass  # the kernel has dropped it by itself
            except OSError as error:
                # The name stays until the kernel needs the memory; opening files under it gives ENOENT already.
                _log.info("the kernel keeps the name %s: %s", name.decode(), error)
