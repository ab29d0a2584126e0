"""The directory to mount on: checked, freed of dead mounts of ours, and claimed while a daemon starts.

A second mount would stack silently on a dead one, so a dead mount is removed; a live one is left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Final

from stepfs.command_hint import command
from stepfs.errors import AbsentError, RefusedError
from stepfs.mount.host.dead_mount import clear_dead, is_dead, list_within
from stepfs.mount.host.mountinfo import FSTYPE, Mounted, mount_at

_log = logging.getLogger("stepfs.mount")

_CLAIM_S: Final = 20.0
_GLANCE_S: Final = 0.05
_STACK_MAX: Final = 16


def prepare(directory: Path) -> None:
    """Ensure an empty directory to mount on; detach dead mounts of ours. `directory` is a real path.

    `AbsentError` if there is no such directory, `RefusedError` if it is in use, not empty or not a directory.
    """
    _clear_dead_mounts(directory)
    try:
        _check_directory(directory)
    except RefusedError:
        _clear_dead_mounts(directory)  # another daemon mounted between the two checks: report that
        raise


def _clear_dead_mounts(directory: Path) -> None:
    for _ in range(_STACK_MAX):
        mounted = mount_at(directory)
        if mounted is None or mounted.fstype != FSTYPE:
            return
        if not is_dead(mounted):
            raise RefusedError(
                f"{directory}: {mounted.source} is mounted here already; unmount it first with"
                f" `{command('stepfs', 'unmount', directory)}`"
            )
        _clear(directory, mounted)


def claim(directory: Path) -> int:
    """`prepare`, and keep other mounts away until the returned descriptor is closed, by the kernel at exit.

    Seconds pass between the check and the mount; two daemons that start together would stack in that time. Close it once
    the mount stands: `prepare` sees that, and a daemon that hangs must not keep the place for ever.
    """
    until = time.monotonic() + _CLAIM_S
    while True:
        prepare(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _lock(descriptor):
                prepare(directory)  # no other daemon was faster
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() > until:
            raise RefusedError(f"{directory}: another mount is starting here; try again when it is done")
        time.sleep(_GLANCE_S)


def _lock(descriptor: int) -> bool:
    """True if we hold the lock, or if the file system has no locks."""
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
        clear_dead(mounted)
    except OSError as error:
        raise RefusedError(
            f"{directory}: a dead mount of {mounted.source} is here and may not be removed ({error.strerror});"
            f" run `{command('fusermount3', '-uz', directory)}` as its owner"
        ) from error


def _check_directory(directory: Path) -> None:
    names = list_within(directory)
    if isinstance(names, FileNotFoundError):
        raise AbsentError(f"{directory} does not exist; create it with `{command('mkdir', '-p', directory)}`")
    if isinstance(names, NotADirectoryError):
        raise RefusedError(f"{directory} is not a directory; choose an empty directory to mount on")
    if names is None:
        raise RefusedError(f"{directory} does not answer; choose another mount point")
    if isinstance(names, OSError):
        raise RefusedError(f"{directory}: {names.strerror}; choose a directory you can read")
    if names:
        raise RefusedError(f"{directory} is not empty ({names[0]!r} …); mounting would hide that, choose another")
