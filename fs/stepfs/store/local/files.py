"""Whole reads, durable writes: the file primitives of the local store."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from stepfs.store.api import Buffer, byte_views

STALE_TEMPORARY_S: Final = 24 * 3600
_VECTORS_MAX: Final = 1024  # IOV_MAX


def links(path: Path) -> int:
    """The number of names of the file; opening it first makes a network file system ask its server (close-to-open)."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fstat(handle).st_nlink
    finally:
        os.close(handle)


def fill(handle: int, offset: int, buffer: memoryview) -> int:
    """Read into `buffer` from byte `offset`; returns the number of bytes, fewer than the buffer's at the end of the
    file."""
    done = 0
    while done < len(buffer):
        got = os.preadv(handle, [buffer[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def write_all(handle: int, parts: Sequence[Buffer]) -> None:
    """Write the concatenation of `parts`, gathered by the kernel, not here."""
    views = byte_views(parts)
    while views:
        written = os.writev(handle, views[:_VECTORS_MAX])
        done = 0
        while done < len(views) and written >= views[done].nbytes:
            written -= views[done].nbytes
            done += 1
        del views[:done]
        if written:
            views[0] = views[0][written:]


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def collect_stale(place: Path, now_s: float) -> None:
    """Delete the leftovers of crashed writers; `now_s` is this file system's time, from a file just written."""
    with suppress(OSError), os.scandir(place) as scan:
        for entry in scan:
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < now_s - STALE_TEMPORARY_S:
                    os.unlink(entry.path)  # noqa: PTH108 (already a str)


def file_system_time_s(place: Path) -> float:
    """The time of the file system that holds `place`: its server stamps inodes, and may disagree with our clock.

    Found by creating a file in `place` and removing it. If that is refused, or there is no space, our own clock is
    used: on a local file system it is the same clock.
    """
    name = place / f"{os.getpid()}-{secrets.token_hex(8)}"
    try:
        place.mkdir(exist_ok=True)
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError:
        return time.time()
    try:
        return os.fstat(handle).st_ctime
    finally:
        os.close(handle)
        with suppress(OSError):
            name.unlink()
