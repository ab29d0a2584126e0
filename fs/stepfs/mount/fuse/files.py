"""Open files: a slice with its bytes pinned, or a small content that was fixed when it was opened."""

from __future__ import annotations

import errno
import logging
from typing import Protocol

import pyfuse3
import trio

from stepfs.data.handle import SliceHandle
from stepfs.errors import CorruptError, StepfsError, StoreUnreachableError
from stepfs.format.ids import SliceIndex
from stepfs.format.snapshot import StepEntry
from stepfs.mount.fuse.guard import errno_of

_log = logging.getLogger("stepfs.mount")

_FAILED_FOR_S = 2.0


class OpenFile(Protocol):
    """The object behind a file handle."""

    async def read(self, offset: int, size: int) -> bytes | memoryview: ...

    def close(self) -> None: ...


class OpenSlice:
    """A rank's file. Prefetch state belongs to the slice, not here: forked workers share this handle."""

    def __init__(self, handle: SliceHandle, entry: StepEntry, index: SliceIndex, rank: int) -> None:
        """`rank`: the lowest rank that reads this slice; for the log."""
        self.entry = entry
        self.index = index
        self._rank = rank
        self._handle = handle
        self._failed_until = 0.0

    async def read(self, offset: int, size: int) -> memoryview:
        """Verified bytes, or an errno that concerns this file alone, logged with the object's key."""
        # After a failed readahead the kernel requests each page again; each must not wait a full deadline.
        if trio.current_time() < self._failed_until:
            raise pyfuse3.FUSEError(errno.ETIMEDOUT)
        try:
            data = await self._handle.read(offset, size)
        except StepfsError as error:
            if isinstance(error, StoreUnreachableError):
                self._failed_until = trio.current_time() + _FAILED_FOR_S
            report = _log.error if isinstance(error, CorruptError) else _log.warning
            key = self.entry.tgb.key
            where = "" if key in str(error) else f"{key}: "
            facts = {
                "step": self.entry.step,
                "slice": self.index,
                "rank": self._rank,
                "version": self.entry.version,
                "alike": (
                    self.entry.step,
                    self.index,
                    type(error),
                ),  # a reader may retry at once, for ever
            }
            report(
                "step %d slice %d cannot be read: %s%s",
                self.entry.step,
                self.index,
                where,
                error,
                extra=facts,
            )
            raise pyfuse3.FUSEError(errno_of(error)) from error
        expected = max(0, min(size, self._handle.length - offset))
        assert len(data) == expected, f"{len(data)} bytes for {expected}: the kernel would pad with zeros"
        return data

    def close(self) -> None:
        self._handle.close()


class OpenUnread:
    """A rank's file, opened by this daemon's own threads to inspect its pages: it pins and fetches nothing."""

    async def read(self, offset: int, size: int) -> bytes:
        del offset, size
        raise pyfuse3.FUSEError(errno.EIO)

    def close(self) -> None:
        """Nothing is held."""


class OpenContent:
    """A file of `.stepfs/` whose bytes are known."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def read(self, offset: int, size: int) -> bytes:
        return self._content[offset : offset + size]

    def close(self) -> None:
        """Nothing is held."""


class FileTable:
    """File handles of one mount."""

    def __init__(self) -> None:
        self._files: dict[int, OpenFile] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._files)

    def add(self, file: OpenFile) -> int:
        handle = self._next
        self._next += 1
        self._files[handle] = file
        return handle

    def get(self, handle: int) -> OpenFile:
        """EBADF for a handle that is not open."""
        file = self._files.get(handle)
        if file is None:
            raise pyfuse3.FUSEError(errno.EBADF)
        return file

    def release(self, handle: int) -> None:
        file = self._files.pop(handle, None)
        if file is not None:
            file.close()

    def entry_of(self, entry_step: int, index: int) -> StepEntry | None:
        """The entry of a slice that is open here, even if it has left the log."""
        for file in self._files.values():
            if isinstance(file, OpenSlice) and (file.entry.step, file.index) == (entry_step, index):
                return file.entry
        return None

    def close_all(self) -> None:
        """Close all files at unmount: the kernel sends no RELEASE then."""
        for handle in list(self._files):
            self.release(handle)
