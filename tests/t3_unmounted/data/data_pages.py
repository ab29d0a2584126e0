"""A kernel's page cache made of files, for what primes one."""

from __future__ import annotations

import threading

from stepfs.data.page_cache import CHUNK_BYTES
from stepfs.format.ids import SliceIndex


class Pages:
    """A kernel whose page cache is a directory of files; an inode number is the file's own."""

    def __init__(self, directory, world):
        self.directory = directory
        self.world = world
        self.chunks = {}  # inode → [(offset, bytes)]
        self.threads = set()
        self.error = None
        self.dropped = []
        for entry in world.entries:
            for index in range(entry.tgb.slices):
                self.path(entry.step, SliceIndex(index)).touch()

    def path(self, step, index):
        return self.directory / f"{step}-{index}"

    def store_pages(self, inode, offset, data):
        self.threads.add(threading.get_native_id())
        if self.error is not None:
            raise self.error
        self.chunks.setdefault(inode, []).append((offset, bytes(data)))

    def content(self, step, index=0):
        chunks = self.chunks.get(self.path(step, index).stat().st_ino, [])
        assert all(offset % 4096 == 0 for offset, _ in chunks)
        assert all(len(data) == CHUNK_BYTES for _, data in chunks[:-1])
        return b"".join(data for _, data in chunks)
