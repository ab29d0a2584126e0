"""What this mount lends to `stepfs.data.pagecache.primer`: paths through itself, and pages into the kernel's cache.

Both are used in worker threads only: a notification from the loop's own thread can deadlock on a locked page, and a
path through the mount is answered by this very loop.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyfuse3

from stepfs.format.ids import SliceIndex, Step
from stepfs.view.naming import rank_name, step_name
from stepfs.view.ranks import RankMap


class LentPages:
    """Implements `stepfs.data.pagecache.primer.PageCache`."""

    def __init__(self, directory: Path, ranks: RankMap, ext: bytes) -> None:
        self._directory = directory
        self._ranks = ranks
        self._ext = ext

    def path(self, step: Step, index: SliceIndex) -> Path:
        """The file of a slice, under the name of the lowest rank that reads it."""
        rank = self._ranks.first_rank_of(index)
        return self._directory / os.fsdecode(step_name(step)) / os.fsdecode(rank_name(rank, self._ext))

    def store_pages(self, inode: int, offset: int, data: memoryview) -> None:
        """Put verified bytes where a reader's first read finds them; OSError if the kernel does not want them."""
        pyfuse3.notify_store(inode, offset, data)  # type: ignore[arg-type]  # any contiguous buffer
