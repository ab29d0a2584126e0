"""Directories that only this user writes to, opened so that nobody can exchange them or what is in them.

A scratch directory that everybody may write to is an ordinary place for caches, and root mounts there too. A stranger
can plant directories and links under any name that he can guess. So each component below the shared directory is
opened relative to its parent's descriptor, never through a link, and used only if it is one's own.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS: Final = 0o077


def home() -> Path:
    """This user's home; one below the temporary directory for a user whom this machine does not know, as in OpenShift."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.environ.get("TMPDIR") or "/tmp") / f"stepfs-{os.geteuid()}"  # noqa: S108 (files in it are checked)


def open_own(path: str | os.PathLike[str], *, parent: int | None = None) -> int:
    """A descriptor of a directory of this user with mode 0700; `PermissionError` if it is not that. OSError."""
    descriptor = os.open(path, _FLAGS, dir_fd=parent)
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & _OTHERS:
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{os.fspath(path)} is not a directory that only this user can enter")


def make_own(path: str | os.PathLike[str], *, parent: int | None = None) -> int:
    """Make a directory with mode 0700 and open it; one that is there must be one's own. OSError."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=parent)
    return open_own(path, parent=parent)
