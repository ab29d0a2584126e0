"""Mounts whose daemon was killed: told from live ones, cut off, and detached.

After `kill -9` of a daemon, `stat` of its mount still succeeds. A mount is therefore healthy if its listing answers.

Clearing cuts the connection before it detaches: after a mere detach no tool could find the mount to free the readers
that hang in it. Cutting ends the reads of a healthy mount as well, so it needs an unmistakable sign: the kernel's own
ENOTCONN or ECONNABORTED. An EIO or EACCES proves nothing about the daemon, and no answer proves nothing either: the
guardian cuts the mount of a killed daemon, so a silent one may only be slow, and a person decides.
"""

from __future__ import annotations

import enum
import errno
import itertools
import os
from pathlib import Path
from typing import Final

from stepfs.command_hint import command
from stepfs.control_files import Identity, answer_within
from stepfs.errors import RefusedError
from stepfs.mount.host.abort import abort_handle, abort_mount
from stepfs.mount.host.mountinfo import Mounted
from stepfs.mount.host.umount import unmount

_NAMES: Final = 8
_DEAD: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED})


def list_within(directory: Path, asked_as: Identity | None = None) -> list[str] | OSError | None:
    """Some names of a directory; the error, if any; None if it did not answer in time.

    Only a few names: a root of 10⁶ steps takes many seconds to list, and its first names prove as much.
    """

    def names() -> list[str]:
        with os.scandir(directory) as found:
            return [entry.name for entry in itertools.islice(found, _NAMES)]

    return answer_within(names, asked_as=asked_as)


class Health(enum.Enum):
    """The state of a mount's daemon, judged by the mount."""

    ALIVE = "alive"
    DEAD = "dead"  # its daemon is certainly gone: it may be cut off and detached
    SILENT = "silent"  # no answer, which proves nothing
    UNKNOWN = "unknown"  # an error that proves nothing: another user's mount gives EACCES


def check_health(mounted: Mounted, *, below: str = "") -> tuple[Health, OSError | None]:
    """The health of a mount, and the error of its listing, in a few seconds at most.

    `below` names a directory in it to list instead of its root.
    """
    answer = list_within(Path(mounted.directory) / below, mounted.asked_as)
    if answer is None:
        return Health.SILENT, None
    if not isinstance(answer, OSError):
        return Health.ALIVE, None
    return Health.DEAD if answer.errno in _DEAD else Health.UNKNOWN, answer


def is_dead(mounted: Mounted) -> bool:
    """Whether a mount has lost its daemon; `RefusedError` if it does not answer and may yet."""
    health, _ = check_health(mounted)
    if health is Health.SILENT:
        raise RefusedError(
            f"{mounted.directory}: a file system is mounted here that does not answer; look at its process, and if that"
            f" is gone or is to be given up, run {give_up_command(mounted.directory)}"
        )
    return health is Health.DEAD


def give_up_command(directory: str) -> str:
    """The command that gives up a mount that hangs. `umount -l` alone leaves its readers hanging."""
    return f"`{command('umount', '-f', directory)} || {command('umount', '-l', directory)}` as root"


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
