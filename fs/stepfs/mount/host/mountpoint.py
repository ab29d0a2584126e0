"""Checks of the mount point, and removal of the mounts that killed daemons left there.

After `kill -9` of a daemon, `stat` of its mount still succeeds and a second mount would stack silently on the dead
one. A mount is therefore healthy if its listing answers. A dead mount of ours is removed; a live one is left alone.

Clearing cuts the connection before it detaches: after a mere detach no tool could find the mount to free the readers
that hang in it. Cutting ends the reads of a healthy mount as well, so it needs an unmistakable sign: the kernel's own
ENOTCONN or ECONNABORTED. An EIO or EACCES proves nothing about the daemon, and no answer proves nothing either: the
guardian cuts the mount of a killed daemon, so a silent one may only be slow, and a person decides.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import itertools
import logging
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepfs.command_hint import command
from stepfs.control_files import answer_within
from stepfs.errors import AbsentError, RefusedError
from stepfs.mount.host.abort import abort_handle, abort_mount
from stepfs.mount.host.mountinfo import FSTYPE, Mounted, mount_at
from stepfs.mount.host.umount import unmount

_log = logging.getLogger("stepfs.mount")

_CLAIM_S: Final = 20.0
_GLANCE_S: Final = 0.05
_STACK_MAX: Final = 16
_NAMES: Final = 8
_DEAD: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED})


def list_within(directory: Path, timeout_s: float | None = None) -> list[str] | OSError | None:
    """Some names of a directory; the error, if any; None if it did not answer in time.

    Only a few names: a root of 10⁶ steps takes many seconds to list, and its first names prove as much.
    """

    def names() -> list[str]:
        with os.scandir(directory) as found:
            return [entry.name for entry in itertools.islice(found, _NAMES)]

    return answer_within(names, timeout_s)


class Health(enum.Enum):
    """The state of a mount's daemon, judged by the mount."""

    ALIVE = "alive"
    DEAD = "dead"  # its daemon is certainly gone: it may be cut off and detached
    SILENT = "silent"  # no answer, which proves nothing
    UNKNOWN = "unknown"  # an error that proves nothing: another user's mount gives EACCES


@dataclass(frozen=True, slots=True)
class MountHealth:
    """The health of a mount, and the error of its listing."""

    health: Health
    error: OSError | None = None


def check_health(mounted: Mounted, *, below: str = "") -> MountHealth:
    """Check a mount, for a few seconds at most; `below` names a directory in it to list instead of its root."""
    answer = list_within(Path(mounted.directory) / below)
    if answer is None:
        return MountHealth(Health.SILENT)
    if not isinstance(answer, OSError):
        return MountHealth(Health.ALIVE)
    return MountHealth(Health.DEAD if answer.errno in _DEAD else Health.UNKNOWN, answer)


def is_dead(mounted: Mounted) -> bool:
    """Whether a mount has lost its daemon; `RefusedError` if it does not answer and may yet."""
    health = check_health(mounted).health
    if health is Health.SILENT:
        raise RefusedError(
            f"{mounted.directory}: a file system is mounted here that does not answer; look at its process, and if that"
            f" is gone or is to be given up, run {give_up_command(mounted.directory)}"
        )
    return health is Health.DEAD


def give_up_command(directory: str) -> str:
    """The command that gives up a mount that hangs. `umount -l` alone leaves its readers hanging."""
    return f"`{command('umount', '-f', directory)} || {command('umount', '-l', directory)}` as root"


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
    """`prepare`, and keep other mounts away until the returned descriptor is closed; the kernel closes it at exit,
    too.

    Seconds pass between the check and the mount; two daemons that start together would stack in that time. Close the
    descriptor once the mount stands: from then on `prepare` sees the mount, and a daemon that hangs must not keep the
    place for ever.
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


def clear_dead(mounted: Mounted) -> None:
    """Cut off and detach a mount that `check_health` found dead. OSError without the right to do so."""
    with abort_handle(mounted.device) as handle:
        if handle is not None:
            os.write(handle, b"1")
    abort_mount(mounted.directory, mounted.mount_id)
    try:
        unmount(Path(mounted.directory), lazy=True)
    except OSError as error:
        if error.errno != errno.EINVAL:  # another process was faster
            raise


def _check_directory(directory: Path) -> None:
    found = answer_within(directory.stat)
    if isinstance(found, FileNotFoundError):
        raise AbsentError(f"{directory} does not exist; create it with `{command('mkdir', '-p', directory)}`")
    if found is None or isinstance(found, OSError):
        why = "does not answer" if found is None else found.strerror
        raise RefusedError(f"{directory}: {why}; choose another mount point")
    if not stat.S_ISDIR(found.st_mode):
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
