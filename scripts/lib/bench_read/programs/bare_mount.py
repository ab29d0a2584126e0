"""The least a pyfuse3 file system can do: a directory of N empty directories and nothing else. Prints "ready".

    python -m bench_read.programs.bare_mount DIR N

The time to list and stat this one is the limit for any mount in this language.
"""

from __future__ import annotations

import errno
import stat
import sys

import pyfuse3
import trio

PREFIX = b"step-"
FIRST = 2


class Bare(pyfuse3.Operations):
    """Names and inodes are arithmetic."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def _entry(self, inode: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = stat.S_IFDIR | 0o555
        entry.st_nlink = 2
        entry.entry_timeout = entry.attr_timeout = 3600
        return entry

    async def getattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        del ctx
        return self._entry(inode)

    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        del parent_inode, ctx
        if not name.startswith(PREFIX) or not 0 <= (step := int(name[len(PREFIX) :])) < self._count:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._entry(FIRST + step)

    async def opendir(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        del ctx
        return inode

    async def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        del fh
        for step in range(start_id, self._count):
            if not pyfuse3.readdir_reply(token, b"step-%09d" % step, self._entry(FIRST + step), step + 1):
                break


async def main() -> None:
    operations = Bare(int(sys.argv[2]))
    pyfuse3.init(operations, sys.argv[1], {*pyfuse3.default_options, "ro", "fsname=bare"})
    print("ready", flush=True)
    try:
        await pyfuse3.main()
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    trio.run(main)
