"""Is the mount point fit to be mounted on; and clearing what a killed daemon left there.

After `kill -9` of a daemon, `stat` of its mount still succeeds and a second mount would stack silently on the dead
one. Health therefore means: its listing answers. A dead mount of ours is taken away; anything live is left alone.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Final

from stepfs.errors import AbsentError, RefusedError
from stepfs.mount.detach import unmount
from stepfs.mount.mountinfo import FSTYPE, Mounted, mount_at

_log = logging.getLogger("stepfs.mount")

ANSWER_S: Final = 5.0
_CLAIM_S: Final = 20.0
_GLANCE_S: Final = 0.05
_STACK_MAX: Final = 16
_NAMES: Final = 8
_DEAD: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV})


def list_within(directory: Path, timeout_s: float = ANSWER_S) -> list[str] | OSError | None:
    """Some names of a directory; the error if it gave one; None if it did not answer in time.

    A handful only: a root of 10⁶ steps takes many seconds to list, and its first names prove as much.
    """
    result: list[list[str] | OSError] = []

    def look() -> None:
        try:
            with os.scandir(directory) as names:
                result.append([entry.name for entry in itertools.islice(names, _NAMES)])
        except OSError as error:
            result.append(error)

    # A thread that hangs in a dead file system is left behind: it is a daemon thread and can be killed.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return result[0] if result else None


def is_dead(directory: Path) -> bool:
    """Whether the mount at `directory` has lost its daemon; `RefusedError` if it does not answer at all."""
    names = list_within(directory)
    if names is None:
        raise RefusedError(
            f"{directory}: a file system is mounted here that does not answer; look at its process, or detach it"
            f" with `umount -l {directory}`"
        )
    return isinstance(names, OSError) and names.errno in _DEAD


def prepare(directory: Path) -> None:
    """Make sure an empty directory is there to mount on; detach dead mounts of ours. `directory` is a real path.

    `AbsentError` if there is no such directory, `RefusedError` if it is in use, not empty or not a directory.
    """
    for _ in range(_STACK_MAX):
        mounted = mount_at(directory)
        if mounted is None or mounted.fstype != FSTYPE:
            break
        if not is_dead(directory):
            raise RefusedError(
                f"{directory}: {mounted.source} is mounted here already; unmount it first with"
                f" `stepfs unmount {directory}`"
            )
        _clear(directory, mounted)
    _check_directory(directory)


def claim(directory: Path) -> int:
    """`prepare`, and let nobody else mount there until the returned descriptor is closed; the kernel closes it, too.

    Between looking and mounting lie seconds, in which two that start together would stack. Close it once the mount
    stands: from then on `prepare` sees that, and a daemon that hangs must not keep its place for ever.
    """
    until = time.monotonic() + _CLAIM_S
    while True:
        prepare(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _lock(descriptor):
                prepare(directory)  # nobody was faster
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() > until:
            raise RefusedError(f"{directory}: another mount is starting here; try again when it is done")
        time.sleep(_GLANCE_S)


def _lock(descriptor: int) -> bool:
    """Whether it is ours now; also where the file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _clear(directory: Path, mounted: Mounted) -> None:
    _log.info("clearing the mount of %s that a dead daemon left at %s", mounted.source, directory)
    try:
        unmount(directory, lazy=True)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return  # somebody was faster
        raise RefusedError(
            f"{directory}: a dead mount of {mounted.source} is here and may not be removed ({error.strerror});"
            f" run `fusermount3 -uz {directory}` as its owner"
        ) from error


def _check_directory(directory: Path) -> None:
    try:
        mode = directory.stat().st_mode
    except FileNotFoundError:
        raise AbsentError(f"{directory} does not exist; create it with `mkdir -p {directory}`") from None
    except OSError as error:
        raise RefusedError(f"{directory}: {error.strerror}; choose another mount point") from error
    if not stat.S_ISDIR(mode):
        raise RefusedError(f"{directory} is not a directory; choose an empty directory to mount on")
    names = list_within(directory)
    if names is None:
        raise RefusedError(f"{directory} does not answer; choose another mount point")
    if isinstance(names, OSError):
        raise RefusedError(f"{directory}: {names.strerror}; choose a directory you can read")
    if names:
        raise RefusedError(
            f"{directory} is not empty ({names[0]!r} …); mounting would hide that, choose another"
        )
