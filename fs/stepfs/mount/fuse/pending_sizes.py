"""The sizes of files that were looked up before their step was committed.

The kernel got size 0 without permission to cache it, so every later request for attributes sees the true size:
buffered reads, pread, fstat, lseek, mmap and O_DIRECT all make one. `splice` and `sendfile` without an fstat do not;
they would find an empty file. So before such a file is opened, the kernel gets its size: storing the last byte moves
the kernel's end of file there (fuse_notify_store in fs/fuse/dev.c; storing no byte does not). It must be the true
byte: another process may already have opened the file and read that page, and the stored byte goes into the page
unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import pyfuse3
import trio

_log = logging.getLogger("stepfs.mount")

StorePages = Callable[[int, int, bytes | memoryview], None]  # `pyfuse3.notify_store`
LastByte = Callable[[], Awaitable[bytes | memoryview]]


class PendingSizes:
    """Inodes that the kernel takes for empty. Bounded by the inodes that the kernel itself remembers."""

    def __init__(self, store: StorePages = pyfuse3.notify_store) -> None:  # type: ignore[assignment]
        self._store = store
        self._pending: set[int] = set()

    def __len__(self) -> int:
        return len(self._pending)

    def note(self, inode: int) -> None:
        """Note that the kernel gets size 0 for this file."""
        self._pending.add(inode)

    def forget(self, inode: int) -> None:
        self._pending.discard(inode)

    async def settle(self, inode: int, size: int, last_byte: LastByte) -> None:
        """Give the kernel the true size before the file is opened; returns at once if it has it."""
        if inode not in self._pending:
            return
        if size:
            try:
                byte = await last_byte()
                # All concurrent opens of the file do the same: one that returned at once might be faster than the
                # kernel. In a worker thread, like every notification: see mount/fuse/notify.py.
                await trio.to_thread.run_sync(self._store, inode, size - 1, byte)
            except (OSError, pyfuse3.FUSEError) as error:
                _log.debug("inode %d keeps size 0 until somebody asks: %s", inode, error)
        self._pending.discard(inode)
