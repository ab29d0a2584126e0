"""From the view's attributes to pyfuse3's: the only module that fills its structures."""

from __future__ import annotations

import os
from typing import Final

import pyfuse3

from stepfs.view.attributes import BLOCK_BYTES_HINT, Attributes

NS_PER_MS: Final = 1_000_000
_SECTOR_BYTES: Final = 512


class Replies:
    """Reply structures; the mounting user owns every file."""

    def __init__(self) -> None:
        self._uid = os.getuid()
        self._gid = os.getgid()

    def entry(self, attributes: Attributes) -> pyfuse3.EntryAttributes:
        """A fresh structure for one reply."""
        entry = pyfuse3.EntryAttributes()
        self.fill(entry, attributes)
        return entry

    def fill(self, entry: pyfuse3.EntryAttributes, attributes: Attributes) -> None:
        """Every field of a structure, new or used."""
        entry.generation = 0
        entry.st_uid = self._uid
        entry.st_gid = self._gid
        entry.st_rdev = 0
        entry.st_blksize = BLOCK_BYTES_HINT
        entry.entry_timeout = attributes.keep_s
        entry.attr_timeout = attributes.keep_s
        entry.st_mode = attributes.mode
        entry.st_nlink = attributes.nlink
        entry.st_size = attributes.size
        entry.st_blocks = -(-attributes.size // _SECTOR_BYTES)
        time_ns = attributes.time_ms * NS_PER_MS
        entry.st_ino = attributes.inode
        entry.st_atime_ns = time_ns
        entry.st_mtime_ns = time_ns
        entry.st_ctime_ns = time_ns
