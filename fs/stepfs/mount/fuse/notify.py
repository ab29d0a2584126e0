"""Notifications to the kernel: pages into its cache for `stepfs.data.pagecache.primer`, names of steps that leave the view.

Both run in worker threads only: a notification from the loop's own thread can deadlock on a locked page, and the loop
itself must answer requests for paths through the mount.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyfuse3
import trio

from stepfs.format.ids import SliceIndex, Step
from stepfs.mount.fuse.lookup_counts import LookupCounts
from stepfs.mount.fuse.meter import Meter
from stepfs.view.file_names import FileNames
from stepfs.view.names import Fixed, step_name
from stepfs.view.tree import Tree

_log = logging.getLogger("stepfs.mount")

_BATCH: Final = 512  # names withdrawn at a time


@dataclass(frozen=True, eq=False)
class KernelPageCache:
    """Implements `stepfs.data.pagecache.primer.PageCache`."""

    directory: Path
    names: FileNames

    def path(self, step: Step, index: SliceIndex) -> Path:
        """The file of a slice, under the name of the lowest rank that reads it."""
        return self.directory / os.fsdecode(step_name(step)) / os.fsdecode(self.names.name_of(index))

    def store_pages(self, inode: int, offset: int, data: memoryview) -> None:
        """Put verified bytes into the page cache for a reader's first read; OSError if the kernel refuses them."""
        pyfuse3.notify_store(inode, offset, data)  # type: ignore[arg-type]  # any contiguous buffer


@dataclass(eq=False)
class Withdrawal:
    """Withdraws names of steps from the kernel as `Tree.first_visible` rises."""

    tree: Tree
    known: LookupCounts
    meter: Meter
    invalidate: Callable[[int, bytes], None] = pyfuse3.invalidate_entry

    def __post_init__(self) -> None:
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
            names = (step_name(step) for step in self.known.between(Step(0), self.tree.first_visible()))
            while batch := list(itertools.islice(names, _BATCH)):
                await trio.to_thread.run_sync(self._withdraw, batch)
                self.meter.steps_invalidated += len(batch)

    def _withdraw(self, names: list[bytes]) -> None:
        for name in names:
            try:
                self.invalidate(Fixed.ROOT, name)
            except FileNotFoundError:
                pass  # the kernel has already dropped it
            except OSError as error:
                # The name stays until the kernel needs the memory; opening a file under it already gives ENOENT.
                _log.info("the kernel keeps the name %s: %s", name.decode(), error)
