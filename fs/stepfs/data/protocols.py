"""Small protocols, by which slices, the primer and the mount use each other."""

from __future__ import annotations

from collections.abc import Callable, Collection
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


class Priming(Protocol):
    """`stepfs.data.pagecache.primer.Primer`, as slices notify it."""

    @property
    def primed(self) -> Collection[SliceKey]: ...
    def changed(self) -> None: ...
    def idle(self, key: SliceKey) -> None: ...
    def closed(self, key: SliceKey, *, awaited: bool) -> None: ...
    def file_closed(self, is_awaited: Callable[[SliceKey], bool]) -> None: ...
    def forget_below(self, step: Step) -> None: ...


class Unprimed:
    """A mount whose page cache is left to the kernel."""

    primed: Collection[SliceKey] = ()

    def changed(self) -> None:
        """Nothing is primed."""

    def idle(self, key: SliceKey) -> None:
        """Nothing is primed."""

    def closed(self, key: SliceKey, *, awaited: bool) -> None:
        """Nothing is primed."""

    def file_closed(self, is_awaited: Callable[[SliceKey], bool]) -> None:
        """Nothing is primed."""

    def forget_below(self, step: Step) -> None:
        """Nothing is primed."""
