"""The directory of a mount's disk cache: claimed by a lock, adopted after a crash, removed at every other ending.

    <cache-dir>/<lake_id>[-<random>]/<token>/lock     held (flock) while the daemon lives; the kernel drops it

A mount never opens, changes or removes files of other users, who may all be allowed to write to the cache directory.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

from stepfs._internal.control_files import answer_within
from stepfs._internal.own_directory import home, make_own, open_own
from stepfs.errors import RefusedError

_log = logging.getLogger("stepfs.mount")
_LOCK: Final = "lock"
# Content of the lock file: whether the directory above was made for this cache, and is removed with it after a crash,
# too; then the mount point. Only one mount stands there, so a cache without a holder that names it is dead.
_MADE_BASE: Final = b"base"
_FOUND_BASE: Final = b"kept"
_PATH_BYTES_MAX: Final = 8192
_ABANDONED_AFTER_S: Final = 86400.0
_TRIES: Final = 16  # others may have the name, or remove the directory that is empty
_LAKE: Final = re.compile(r"([0-9a-f]{32})(?:-[0-9a-f]{16})?")


def default_cache_dir() -> Path:
    """/var/cache/stepfs for root, the XDG cache directory for other users."""
    if os.geteuid() == 0:
        return Path("/var/cache/stepfs")
    base = os.environ.get("XDG_CACHE_HOME") or str(home() / ".cache")
    return Path(base) / "stepfs"


@dataclass(frozen=True, eq=False)
class CachePlace:
    """One claimed directory, 0700. A context manager: leaving removes it."""

    path: Path
    lake: int  # the descriptor of its parent; closed by `remove`
    lock: int  # that of its lock; closed by `remove`
    adopted: bool
    keep_base: bool
    mounted_at: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @classmethod
    def inherited(cls, path: Path, lock: int, *, keep_base: bool) -> Self:
        """The one of the daemon before, whose lock is `lock`."""
        return cls(path, open_own(path.parent), lock, adopted=True, keep_base=keep_base)

    def remove(self) -> None:
        """Remove the directory and, if they are empty, the directories that were made for it. Not on a disk that hangs."""
        if answer_within(partial(os.fstatvfs, self.lake)) is None:
            _log.warning("%s does not answer: it is left there", self.path)
            return
        shutil.rmtree(self.path.name, ignore_errors=True, dir_fd=self.lake)
        os.close(self.lock)
        os.close(self.lake)
        parent = self.path.parent
        for made in (parent,) if self.keep_base else (parent, parent.parent):
            try:
                made.rmdir()
            except OSError:
                break  # another cache is in it

    def release(self) -> None:
        """Release the lock and keep the contents."""
        os.close(self.lock)
        os.close(self.lake)

    def left_at(self) -> float:
        """The time of the last change in it, in seconds of the epoch."""
        return os.stat(self.path.name, dir_fd=self.lake, follow_symlinks=False).st_mtime


@contextmanager
def claimed(
    cache_dir: Path | None,
    lake_id: str,
    directory: Path | None = None,
    *,
    inherited: CachePlace | None = None,
    is_ours: Callable[[], bool] = lambda: True,
) -> Iterator[CachePlace | None]:
    """A claimed directory inside the context, or the inherited one; removed on leaving if it is still ours.

    Without a cache directory None, and nothing is written.
    """
    place = inherited or (None if cache_dir is None else claim(cache_dir, lake_id, directory))
    try:
        yield place
    finally:
        if place is not None:
            (place.remove if is_ours() else place.release)()


def answers(cache_dir: Path) -> bool:
    """Whether its disk does; an error is an answer."""
    return answer_within(lambda: list(cache_dir.iterdir())) is not None


def claim(cache_dir: Path, lake_id: str, directory: Path | None = None) -> CachePlace:
    """Adopt the cache of a crashed mount of this lake, or make a new directory; else `RefusedError`.

    `directory`: the mount point, which the caller has claimed.
    """
    if not answers(cache_dir):
        raise RefusedError(
            f"the cache directory {cache_dir} does not answer; choose one of a local disk with --cache-dir"
        )
    try:
        keep_base = cache_dir.is_dir() and cache_dir != default_cache_dir()
        cache_dir.mkdir(parents=True, exist_ok=True)
        base = os.open(cache_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sweep(base, cache_dir, keep=lake_id, directory=directory)
            place = _adopt(base, cache_dir, lake_id, keep_base=keep_base) or _make(
                base, cache_dir, lake_id, keep_base=keep_base
            )
            os.ftruncate(place.lock, 0)
            os.pwrite(place.lock, _FOUND_BASE if place.keep_base else _MADE_BASE, 0)
            os.pwrite(place.lock, os.fsencode(directory or ""), len(_MADE_BASE))
            return place
        finally:
            os.close(base)
    except OSError as error:
        raise RefusedError(
            f"cannot use the cache directory {cache_dir}: {error.strerror or error}; choose one of a local disk with --cache-dir"
        ) from error


def _adopt(base: int, cache_dir: Path, lake_id: str, *, keep_base: bool) -> CachePlace | None:
    for name in sorted(os.listdir(base)):
        if _lake_id_of(name) == lake_id:
            for place in _left(base, cache_dir / name, keep_base=keep_base):
                return place
    return None


def _left(base: int, lake_path: Path, *, keep_base: bool) -> Iterator[CachePlace]:
    """The caches without a holder in a lake's directory, if it is ours; other users' files are skipped."""
    try:
        lake = open_own(lake_path.name, parent=base)
    except OSError:
        return
    try:
        for name in sorted(os.listdir(lake)):  # noqa: PTH208
            lock = _try_lock(name, parent=lake, create=False)
            if lock is not None:
                told = os.pread(lock, _PATH_BYTES_MAX, 0)
                kept = keep_base and not told.startswith(_MADE_BASE)
                at = Path(os.fsdecode(told[len(_MADE_BASE) :])) if len(told) > len(_MADE_BASE) else None
                yield CachePlace(lake_path / name, os.dup(lake), lock, adopted=True, keep_base=kept, mounted_at=at)
    finally:
        os.close(lake)


def _make(base: int, cache_dir: Path, lake_id: str, *, keep_base: bool) -> CachePlace:
    name = lake_id
    for _ in range(_TRIES):
        try:
            lake = make_own(name, parent=base)
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.EACCES, errno.ENOTDIR, errno.ELOOP, None}:
                raise
            name = f"{lake_id}-{secrets.token_hex(8)}"  # another user's is there
            continue
        token = secrets.token_hex(8)
        try:
            os.close(make_own(token, parent=lake))
            lock = _try_lock(token, parent=lake, create=True)
        except FileNotFoundError:
            lock = None  # another mount, ending, has removed the empty lake directory
        except BaseException:
            os.close(lake)
            raise
        if lock is not None:
            return CachePlace(cache_dir / name / token, lake, lock, adopted=False, keep_base=keep_base)
        shutil.rmtree(token, ignore_errors=True, dir_fd=lake)
        os.close(lake)
    raise OSError(errno.ENOLCK, "no file in it can be locked")


def _sweep(base: int, cache_dir: Path, *, keep: str, directory: Path | None) -> None:
    """Remove the caches of crashed mounts of other lakes: of this mount point at once, others after a day."""
    for name in os.listdir(base):
        if _lake_id_of(name) not in {None, keep}:
            with suppress(OSError):  # just removed by another mount
                _sweep_lake(base, cache_dir / name, directory)


def _sweep_lake(base: int, lake_path: Path, directory: Path | None) -> None:
    for place in _left(base, lake_path, keep_base=True):
        is_of_here = directory is not None and place.mounted_at == directory
        if is_of_here or time.time() - place.left_at() > _ABANDONED_AFTER_S:
            place.remove()
        else:
            place.release()


def _try_lock(name: str, *, parent: int, create: bool) -> int | None:
    """The descriptor of the lock of `name` in `parent`; None if it is held, or not ours, or being removed."""
    try:
        directory = open_own(name, parent=parent)
    except OSError:
        return None
    try:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        descriptor = os.open(_LOCK, flags, 0o600, dir_fd=directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and os.stat(_LOCK, dir_fd=directory).st_ino == status.st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
    except OSError:
        pass
    finally:
        os.close(directory)
    return None


def _lake_id_of(name: str) -> str | None:
    match = _LAKE.fullmatch(name)
    return match[1] if match else None
