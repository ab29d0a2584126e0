"""Notifications to the kernel: pages into its cache for `stepfs.data.pagecache.primer`, names of steps that leave the view.

Both run in worker threads only: a notification from the loop's own thread can deadlock on a locked page, and the loop
itself must answer requests for paths through the mount.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pyfuse3
import trio

from stepfs.format.ids import SliceIndex, Step
from stepfs.mount.fuse.lookup_counts import LookupCounts
from stepfs.mount.fuse.meter import Meter
from stepfs.view.file_names import FileNames
from stepfs.view.inodes import Fixed
from stepfs.view.naming import step_name
from stepfs.view.tree import Tree

_log = logging.getLogger("stepfs.mount")

_BATCH: Final = 512  # names withdrawn at a time

Invalidate = Callable[[int, bytes], None]


class KernelPageCache:
    """Implements `stepfs.data.pagecache.primer.PageCache`."""

    def __init__(self, directory: Path, names: FileNames) -> None:
        self._directory = directory
        self._names = names

    def path(self, step: Step, index: SliceIndex) -> Path:
        """The file of a slice, under the name of the lowest rank that reads it."""
        return self._directory / os.fsdecode(step_name(step)) / os.fsdecode(self._names.name_of(index))

    def store_pages(self, inode: int, offset: int, data: memoryview) -> None:
        """Put verified bytes into the page cache for a reader's first read; OSError if the kernel refuses them."""
        pyfuse3.notify_store(inode, offset, data)  # type: ignore[arg-type]  # any contiguous buffer


class Withdrawal:
    """Withdraws names of steps from the kernel as `Tree.first_visible` rises."""

    def __init__(
        self,
        tree: Tree,
        known: LookupCounts,
        meter: Meter,
        *,
        invalidate: Invalidate = pyfuse3.invalidate_entry,
    ) -> None:
        self._tree = tree
        self._known = known
        self._meter = meter
        self._invalidate = invalidate
        self._wake = trio.Event()

    def note(self) -> None:
        """Steps left the view. Never waits."""
        self._wake.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Withdraw names until cancelled; a started batch is finished."""
        task_status.started()
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            names = (step_name(step) for step in self._known.between(Step(0), self._tree.first_visible()))
            while batch := list(itertools.islice(names, _BATCH)):
                await trio.to_thread.run_sync(self._withdraw, batch)
                self._meter.steps_invalidated += len(batch)

    def _withdraw(self, names: list[bytes]) -> None:
        for name in names:
            try:
                self._invalidate(Fixed.ROOT, name)
            except FileNotFoundError:
                pass  # the kernel has already dropped it
            except OSError as error:
                # The name stays until the kernel needs the memory; opening a file under it already gives ENOENT.
                _log.info("the kernel keeps the name %s: %s", name.decode(), error)
