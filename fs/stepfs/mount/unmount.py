"""`stepfs unmount`: remove the mount, and return when its daemon and its cache are gone.

The daemon is found through the mount itself (`.stepfs/config.json`), never through a pid file that may be wrong; a pid
counts only together with its start time. A busy mount stays unchanged; a mount that is busy only for a moment, because
`df` or `stepfs doctor` reads it, is not refused.
"""

from __future__ import annotations

import errno
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stepfs.control_files import read_config
from stepfs.errors import AbsentError, RefusedError, StepfsError
from stepfs.mount.daemon import log_file
from stepfs.mount.host.dead_mount import clear_dead, is_dead
from stepfs.mount.host.mountinfo import FSTYPE, mount_at, real_directory
from stepfs.mount.host.procfs import process_start
from stepfs.mount.host.umount import unmount

GONE_S: Final = 60.0
_GLANCE_S: Final = 0.02
_USERS_SHOWN: Final = 3
_BUSY_S: Final = 1.0  # a pass over all mounts of the machine, as by `df`, holds this one no longer
_BUSY_RETRY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Daemon:
    """The process behind a mount."""

    pid: int
    process_start: int | None
    cache_dir: Path

    def alive(self) -> bool:
        """Whether that very process still runs."""
        return self.process_start is not None and process_start(self.pid) == self.process_start


def daemon_of(directory: Path) -> Daemon:
    """The daemon of a live mount, from its config.json; errors as `read_control_file`."""
    body: Any = read_config(directory)
    return Daemon(body["pid"], body["process_start"], Path(body["cache_dir"]))


def unmount_and_wait(directory: Path, *, timeout_s: float = GONE_S) -> None:
    """Unmount; returns when the daemon is gone and its cache removed.

    `AbsentError` if nothing is mounted there, `RefusedError` if it is busy (nothing was changed) or not ours.
    """
    where = real_directory(directory)
    mounted = mount_at(where)
    if mounted is None:
        raise AbsentError(f"{directory}: nothing is mounted here")
    if mounted.fstype != FSTYPE:
        raise RefusedError(f"{directory}: a {mounted.fstype} file system is mounted here, not stepfs; use umount")
    if is_dead(mounted):  # left by a killed daemon: there is no process to wait for
        try:
            clear_dead(mounted)
        except OSError as error:
            raise _not_ours(directory, error) from error
        return
    daemon = daemon_of(where)
    descriptor = _pidfd(daemon)
    try:
        _detach(where)
        _wait(daemon, log_file(where), descriptor, time.monotonic() + timeout_s)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _detach(directory: Path) -> None:
    try:
        _unmount_once_idle(directory)
    except OSError as error:
        if error.errno == errno.EBUSY:
            users = ", ".join(users_of(directory)[:_USERS_SHOWN])
            raise RefusedError(
                f"{directory} is busy{f' ({users})' if users else ''}; nothing was changed: end what uses it and try again"
            ) from error
        raise _not_ours(directory, error) from error


def _not_ours(directory: Path, error: OSError) -> RefusedError:
    return RefusedError(f"{directory}: cannot unmount ({error.strerror}); do it as the user who mounted")


def _unmount_once_idle(directory: Path) -> None:
    """Unmount; while the mount is in use, retry for a moment."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            return unmount(directory, lazy=False)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(_BUSY_RETRY_S)


def _pidfd(daemon: Daemon) -> int | None:
    if not daemon.alive():
        return None  # another pid namespace: only the cache directory can be watched
    try:
        descriptor = os.pidfd_open(daemon.pid)
    except OSError:
        return None
    if daemon.alive():
        return descriptor
    os.close(descriptor)
    return None


def _wait(daemon: Daemon, log: Path, descriptor: int | None, deadline: float) -> None:
    if descriptor is not None:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise StepfsError(f"unmounted, but the daemon (pid {daemon.pid}) has not ended; look at {log}")
    while daemon.cache_dir.exists():
        if time.monotonic() > deadline:
            raise StepfsError(f"unmounted, but the cache {daemon.cache_dir} is still there; remove it")
        time.sleep(_GLANCE_S)


def users_of(directory: Path) -> list[str]:
    """Processes with open files below `directory`, as "name (pid)", as far as we may inspect them."""
    found = []
    prefix = f"{directory}/"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            links = [process / "cwd", *(process / "fd").iterdir()]
            targets = [os.readlink(link) for link in links]  # noqa: PTH115 (text, not a path to resolve)
            if any(target == str(directory) or target.startswith(prefix) for target in targets):
                found.append(f"{(process / 'comm').read_text().strip()} ({process.name})")
        except OSError:
            continue
    return sorted(found)
