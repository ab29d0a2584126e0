"""Directories that only this user writes to, opened so that no other user can exchange them or their contents.

A scratch directory that all users may write to is a common place for caches, and root mounts there, too. Another user
can plant directories and links under any name that can be guessed. So each component below the shared directory is
opened relative to its parent's descriptor, never through a link, and used only if this user owns it.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Final

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS: Final = 0o077


def home() -> Path:
    """This user's home; below the temporary directory for a user without an account on this machine, as in
    OpenShift.
    """
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.environ.get("TMPDIR") or "/tmp") / f"stepfs-{os.geteuid()}"  # noqa: S108 (files in it are checked)


def open_own(path: str | os.PathLike[str], *, parent: int | None = None) -> int:
    """A descriptor of a directory of this user with mode 0700; `PermissionError` for any other directory. OSError."""
    descriptor = os.open(path, _FLAGS, dir_fd=parent)
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & _OTHERS:
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{os.fspath(path)} is not a directory that only this user can enter")


def make_own(path: str | os.PathLike[str], *, parent: int | None = None) -> int:
    """Make a directory with mode 0700 and open it; an existing one must belong to this user. OSError.

    ENOTSUP where the file system does not keep modes or owners (CIFS, vfat, NFS for root): no directory will do there.
    """
    try:
        os.mkdir(path, 0o700, dir_fd=parent)
    except FileExistsError:
        return open_own(path, parent=parent)
    try:
        return open_own(path, parent=parent)
    except PermissionError:
        found = os.stat(path, dir_fd=parent, follow_symlinks=False)
        os.rmdir(path, dir_fd=parent)
        kept = f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
        why = f"its file system keeps no owners or modes (a new directory of this user with mode 0700 has {kept})"
        raise OSError(errno.ENOTSUP, why) from None
