"""The parties to the page cache, by which slices, the primer and the mount use each other."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from stepfs.format.ids import SliceIndex, SliceKey, Step


class PageCache(Protocol):
    """The calls that the mount offers. Called in worker threads only; OSError where it cannot be done."""

    def path(self, step: Step, index: SliceIndex) -> Path:
        """The file of a slice, through the mount."""
        ...

    def store_pages(self, inode: int, offset: int, data: memoryview) -> None:
        """`pyfuse3.notify_store`."""
        ...


class Priming:
    """What slices tell `stepfs.data.pagecache.primer.Primer`; by itself it leaves the page cache to the kernel."""

    @property
    def primed(self) -> Collection[SliceKey]:
        """The slices in the page cache, as far as is known: they need not be in memory too."""
        return ()

    def changed(self) -> None:
        """A slice became ready, readers moved, or memory is short: all requests are looked at again."""

    def idle(self, key: SliceKey) -> None:
        """A file is open, apparently without a reader: its pages may be dropped for others."""

    def closed(self, key: SliceKey, *, awaited: bool = False) -> None:
        """A file was closed: its pages may go when room is needed."""

    def forget_below(self, step: Step) -> None:
        """Names of steps below leave the mount, and with the names the kernel drops the pages."""
