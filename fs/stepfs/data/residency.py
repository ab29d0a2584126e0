"""A file's pages in the kernel's cache: how many there are, keeping them, putting them out. For worker threads.

`cachestat` (Linux 6.5) counts pages of a descriptor; before it, `mincore` on a mapping, which touches no page. Both
need the file to be this user's own. None means that the kernel gives no answer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SYS_CACHESTAT: Final = 451  # the same on every architecture
_PAGE: Final = mmap.PAGESIZE
_PROT_READ: Final = 1
_MAP_SHARED: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def resident_bytes(path: Path, length: int) -> int | None:
    """Bytes of the file that a reader would find cached, whole pages counted up to `length`."""
    with _opened(path) as descriptor:
        return resident_bytes_of(descriptor, length)


def resident_bytes_of(descriptor: int, length: int) -> int | None:
    """`resident_bytes` of an open file."""
    pages = _cachestat_pages(descriptor, length)
    if pages is None:
        pages = _mincore_pages(descriptor, length)
    return None if pages is None else min(pages * _PAGE, length)


def drop_pages(path: Path) -> None:
    """Let the kernel forget the file's clean pages."""
    with _opened(path) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def mark_used(path: Path, length: int) -> None:
    """Let the kernel count the file's pages as used, without copying a byte of them.

    Otherwise the first reader pays for that (a sixth of its time, for pages moved to the active list one by one), and
    until then they are the first to be evicted. OSError if one of them is not there.
    """
    with _opened(path) as descriptor, _opened(Path(os.devnull), os.O_WRONLY) as nowhere:
        offset = 0
        while offset < length and (count := os.sendfile(nowhere, descriptor, offset, length - offset)):
            offset += count


def _cachestat_pages(descriptor: int, length: int) -> int | None:
    where = (ctypes.c_uint64 * 2)(0, length)  # offset, length
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, writeback, evicted, recently evicted
    failed = _libc.syscall(_SYS_CACHESTAT, descriptor, ctypes.byref(where), ctypes.byref(found), 0)
    return None if failed else int(found[0])


def _mincore_pages(descriptor: int, length: int) -> int | None:
    if not length:
        return 0
    address = _libc.mmap(None, length, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address in {None, ctypes.c_void_p(-1).value}:
        return None
    try:
        pages = ctypes.create_string_buffer(-(-length // _PAGE))
        if _libc.mincore(address, length, pages):
            return None
        return sum(byte & 1 for byte in pages.raw)
    finally:
        _libc.munmap(address, length)
