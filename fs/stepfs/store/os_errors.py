"""From a failed system call to an error for the user: errno to one line and one error class."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from stepfs.errors import RefusedError, StepfsError, StoreUnreachableError, UsageError

_RIGHT: Final = "; check owner, mode and mount options"
_LINKS: Final = "; file:// lakes need a file system with hard links, use another"
_FILES: Final = "; raise ulimit -n"
_REFUSALS: Final = {
    errno.EFBIG: "; raise ulimit -f",
    errno.EACCES: _RIGHT,
    errno.EPERM: _RIGHT,
    errno.EROFS: _RIGHT,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ELOOP: "; remove the symbolic link that stands in its place",
    errno.ENOTDIR: "; move away the file that stands where a directory belongs",
    errno.EXDEV: _LINKS,
    errno.EOPNOTSUPP: _LINKS,
    errno.EMLINK: _LINKS,
    errno.ENOSYS: _LINKS,
}


def explain(error: OSError, root: Path, doing: str) -> StepfsError:
    """The error to raise (from `error`) when `doing` ('write a/b', …) failed below `root`."""
    what = f"cannot {doing} on the file system of {root}: {(error.strerror or str(error)).lower()}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:  # producers and reclaimers wait for space, too
        return StoreUnreachableError(f"{what}; free space and retry")
    if error.errno in _REFUSALS:
        return RefusedError(what + _REFUSALS[error.errno])
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{what}; use a shorter directory")
    return StoreUnreachableError(f"{what} (errno {error.errno}); check the file system and retry")


@contextmanager
def explained(root: Path, doing: str) -> Iterator[None]:
    """Convert an `OSError` of the body with `explain`."""
    try:
        yield
    except OSError as error:
        raise explain(error, root, doing) from error
