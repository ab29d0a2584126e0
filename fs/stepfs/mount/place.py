"""The directory a mount keeps its cache in: claimed by a lock, adopted after a crash, removed at every other ending.

    <cache-dir>/<lake_id>/<token>/lock        held (flock) for as long as the daemon lives; the kernel drops it

A directory nobody holds was left by a crash: the next mount of the same lake takes it over, with what is in it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from stepfs.errors import RefusedError

_LOCK: Final = "lock"
_MADE_BASE: Final = (
    b"base"  # in the lock: the directory above was made for it, so it goes with it, after a crash, too
)
_ABANDONED_AFTER_S: Final = 86400.0


def default_cache_dir() -> Path:
    """/var/cache/stepfs for root, the XDG cache directory for everybody else."""
    if os.geteuid() == 0:
        return Path("/var/cache/stepfs")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "stepfs"


class CachePlace:
    """One claimed directory, 0700. A context manager: leaving removes it."""

    def __init__(self, path: Path, lock: int, *, adopted: bool, keep_base: bool) -> None:
        self.path = path
        self.adopted = adopted
        self._lock = lock
        self._keep_base = keep_base

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the directory and, when they are empty, those that were made for it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        lake = self.path.parent
        for made in (lake,) if self._keep_base else (lake, lake.parent):
            try:
                made.rmdir()
            except OSError:
                break  # somebody else's cache is in it


def claim(cache_dir: Path, lake_id: str) -> CachePlace:
    """Adopt what a crashed mount of this lake left, or make a new directory. `RefusedError` if that is not possible."""
    mine = cache_dir / lake_id
    keep_base = cache_dir.is_dir() and cache_dir != default_cache_dir()
    try:
        _sweep(cache_dir, keep=mine)
        if mine.is_dir():
            for left in sorted(mine.iterdir()):
                lock = _try_lock(left, create=False)
                if lock is not None:
                    kept = keep_base and os.pread(lock, len(_MADE_BASE), 0) != _MADE_BASE
                    return CachePlace(left, lock, adopted=True, keep_base=kept)
        while True:
            fresh = mine / secrets.token_hex(8)
            fresh.mkdir(parents=True, mode=0o700)
            lock = _try_lock(fresh, create=True)
            if lock is not None:
                if not keep_base:
                    os.pwrite(lock, _MADE_BASE, 0)
                return CachePlace(fresh, lock, adopted=False, keep_base=keep_base)
    except OSError as error:
        raise RefusedError(
            f"cannot use the cache directory {cache_dir}: {error.strerror}; choose one with --cache-dir"
        ) from error


def _sweep(cache_dir: Path, *, keep: Path) -> None:
    """Remove what mounts of other lakes left by a crash a day ago and never came back for."""
    if not cache_dir.is_dir():
        return
    for lake in cache_dir.iterdir():
        if lake != keep and _is_lake_id(lake.name):
            with suppress(OSError):  # another user's, or just removed by another mount
                _sweep_lake(lake)


def _sweep_lake(lake: Path) -> None:
    for left in lake.iterdir():
        if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
            lock = _try_lock(left, create=False)
            if lock is not None:
                CachePlace(left, lock, adopted=True, keep_base=True).remove()


def _try_lock(directory: Path, *, create: bool) -> int | None:
    """The lock's descriptor; None if somebody holds it, or removed it between our open and our lock."""
    path = directory / _LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _is_lake_id(name: str) -> bool:
    return len(name) == 32 and all(letter in "0123456789abcdef" for letter in name)
