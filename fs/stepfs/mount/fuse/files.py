"""Open files: a slice with its bytes pinned, or a small content that was fixed when it was opened."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from typing import Final

import pyfuse3
import trio

from stepfs.data.slices import SliceHandle
from stepfs.errors import CorruptError, StepfsError, StoreUnreachableError
from stepfs.format.ids import SliceIndex
from stepfs.format.snapshot import StepEntry
from stepfs.mount.fuse.files import OpenDirectory
from stepfs.mount.fuse.guard import errno_of

_log = logging.getLogger("stepfs.mount")

_FAILED_FOR_S: Final = 2.0
HELD_BACK_S: Final = 1.0  # umount2(2) follows the question at once


class OpenFile:
    """The object behind a file handle."""

    async def read(self, offset: int, size: int) -> bytes | memoryview:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what is held, if anything is."""


@dataclass(eq=False, slots=True)
class OpenSlice(OpenFile):
    """A rank's file. Prefetch state belongs to the slice, not here: forked workers share this handle."""

    handle: SliceHandle
    entry: StepEntry
    index: SliceIndex
    rank: int  # the lowest one that reads this slice; for the log
    failed_until: float = 0.0

    async def read(self, offset: int, size: int) -> memoryview:
        """Verified bytes, or an errno that concerns this file alone, logged with the object's key."""
        # After a failed readahead the kernel requests each page again; each must not wait a full deadline.
        if trio.current_time() < self.failed_until:
            raise pyfuse3.FUSEError(errno.ETIMEDOUT)
        try:
            data = await self.handle.read(offset, size)
        except StepfsError as error:
            if isinstance(error, StoreUnreachableError):
                self.failed_until = trio.current_time() + _FAILED_FOR_S
            self._report(error)
            raise pyfuse3.FUSEError(errno_of(error)) from error
        expected = max(0, min(size, self.handle.length - offset))
        assert len(data) == expected, f"{len(data)} bytes for {expected}: the kernel would pad with zeros"
        return data

    def _report(self, error: StepfsError) -> None:
        step, key = self.entry.step, self.entry.tgb.key
        facts = {
            "step": step,
            "slice": self.index,
            "rank": self.rank,
            "version": self.entry.version,
            "alike": (step, self.index, type(error)),  # a reader may retry at once, for ever
        }
        level = logging.ERROR if isinstance(error, CorruptError) else logging.WARNING
        where = "" if key in str(error) else f"{key}: "
        _log.log(level, "step %d slice %d cannot be read: %s%s", step, self.index, where, error, extra=facts)

    def close(self) -> None:
        self.handle.close()


class OpenUnread(OpenFile):
    """A rank's file, opened by this daemon's own threads to inspect its pages: it pins and fetches nothing."""

    async def read(self, offset: int, size: int) -> bytes:
        del offset, size
        raise pyfuse3.FUSEError(errno.EIO)


@dataclass(eq=False, slots=True)
class OpenContent(OpenFile):
    """A file of `.stepfs/` whose bytes are known."""

    content: bytes

    async def read(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size]


class FileTable:
    """File handles of one mount, whichever namespace they were opened in."""

    def __init__(self) -> None:
        self.directories: dict[int, OpenDirectory] = {}
        self._files: dict[int, OpenFile] = {}
        self._free_from = float("-inf")
        self._held_back = 0
        self._slices: dict[tuple[int, int], dict[int, StepEntry]] = {}  # step, slice → its handles
        self._next = 1

    def __len__(self) -> int:
        return len(self._files)

    def add(self, file: OpenFile) -> int:
        handle = self._next
        self._next += 1
        self._files[handle] = file
        if isinstance(file, OpenSlice):
            self._slices.setdefault((file.entry.step, file.index), {})[handle] = file.entry
        return handle

    def get(self, handle: int) -> OpenFile:
        """EBADF for a handle that is not open."""
        file = self._files.get(handle)
        if file is None:
            raise pyfuse3.FUSEError(errno.EBADF)
        return file

    def release(self, handle: int) -> None:
        file = self._files.pop(handle, None)
        if isinstance(file, OpenSlice):
            slice_ = (file.entry.step, file.index)
            del self._slices[slice_][handle]
            if not self._slices[slice_]:
                del self._slices[slice_]
        if file is not None:
            file.close()

    def entry_of(self, step: int, index: int) -> StepEntry | None:
        """The entry of a slice that is open here, even if it has left the log."""
        return next(iter(self._slices.get((step, index), {}).values()), None)

    def in_use(self) -> bool:
        """Whether anybody but this daemon has a file or a directory open, or is held back by `close_door`."""
        others = any(not isinstance(file, OpenUnread) for file in self._files.values())
        return others or bool(self.directories or self._held_back)

    def close_door(self) -> None:
        """Hold back whoever opens a slice in the next moment: the mount is about to leave one namespace, and to end."""
        self._free_from = trio.current_time() + HELD_BACK_S

    async def pass_door(self) -> None:
        """Return once a slice may be opened, mostly at once."""
        while trio.current_time() < self._free_from:
            self._held_back += 1
            try:
                await trio.sleep_until(self._free_from)
            finally:
                self._held_back -= 1

    def close_all(self) -> None:
        """Close all files at unmount: the kernel sends no RELEASE then."""
        for handle in list(self._files):
            self.release(handle)
