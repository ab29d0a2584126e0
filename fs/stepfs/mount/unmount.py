"""`stepfs unmount`: remove the mount, and return when its daemon and its cache are gone.

The daemon is found through the mount itself (`.stepfs/config.json`), and counts only together with its start time. A busy
mount stays unchanged.
"""

import errno
import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stepfs._internal.control_files import answer_within, read_config, read_status
from stepfs.errors import AbsentError, RefusedError, StepfsError, command
from stepfs.mount.host.kernel import process_start
from stepfs.mount.host.mount_points import clear_dead, is_dead, reopen, unmount
from stepfs.mount.host.mount_table import FSTYPE, Mounted, mount_at, mounts, real_directory
from stepfs.mount.launch import end, keeper_of
from stepfs.mount.logs import log_file

_GONE_S: Final = 60.0
_GLANCE_S: Final = 0.02
_USERS_SHOWN: Final = 3
_UNSEEN: Final = "by a process that waits for a step, opened one within 10 s, or is of another user or mount namespace, such as a pod's"
_BUSY_S: Final = 1.0  # a pass over all mounts of the machine, as by `df`, holds this one no longer
_BUSY_RETRY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Daemon:
    """The process behind a mount."""

    pid: int
    process_start: int | None
    cache_dir: Path | None

    def alive(self) -> bool:
        return self.process_start is not None and process_start(self.pid) == self.process_start


def daemon_of(mounted: Mounted) -> Daemon:
    """The daemon of a live mount, from its config.json; errors as `read_control_file`."""
    body: Any = read_config(Path(mounted.directory), asked_as=mounted.asked_as)
    cache = body["cache_dir"]
    return Daemon(body["pid"], body["process_start"], None if cache is None else Path(cache))


def unmount_and_wait(directory: Path) -> None:
    """Unmount; returns when the daemon is gone and its cache removed.

    `AbsentError` if nothing is mounted there, `RefusedError` if it is busy (nothing was changed) or not ours.
    """
    where = real_directory(directory)
    mounted = mount_at(where)
    if mounted is None:
        if reopen(where):  # by a daemon that was told to end
            return
        raise AbsentError(f"{directory}: nothing is mounted here; `stepfs doctor` lists the mounts of this machine")
    if mounted.fstype != FSTYPE:
        raise RefusedError(f"{directory}: a {mounted.fstype} file system is mounted here, not stepfs; use umount")
    if end(mounted):  # no daemon serves: its keeper takes the mount away, and ends
        return
    if is_dead(mounted):  # left by a killed daemon: there is no process to wait for
        try:
            clear_dead(mounted)
        except OSError as error:
            raise _not_ours(directory, error) from error
        return
    daemon = daemon_of(mounted)
    descriptors = _pidfds(daemon, mounted)
    try:
        _detach(mounted)
        _check_elsewhere(mounted, daemon)
        _wait(daemon, log_file(where), descriptors, time.monotonic() + _GONE_S)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _detach(mounted: Mounted) -> None:
    directory = Path(mounted.directory)
    try:
        _unmount_once_idle(mounted)
    except OSError as error:
        if error.errno == errno.EBUSY:
            users = ", ".join(users_of(directory)[:_USERS_SHOWN] or [_reads_of_the_gone(directory) or _UNSEEN])
            raise RefusedError(
                f"{directory} is busy ({users}); nothing was changed: end what uses it and try again"
            ) from error
        raise _not_ours(directory, error) from error


def _reads_of_the_gone(directory: Path) -> str:
    """The kernel does not pass it on when a reader is killed in a READ: its file stays open until the READ has ended."""
    with suppress(StepfsError):
        store: Any = read_status(directory)["store"]
        if not store["reachable"]:
            by_hand = command("umount", "-f", directory)
            return f"by a read that waits for the store, which does not answer, up to 300 s, or until `{by_hand}`"
    return ""


def _not_ours(directory: Path, error: OSError) -> RefusedError:
    return RefusedError(f"{directory}: cannot unmount ({error.strerror}); do it as the user who mounted")


def _unmount_once_idle(mounted: Mounted) -> None:
    """Unmount; while the mount is in use, retry for a moment."""
    deadline = time.monotonic() + _BUSY_S
    directory = Path(mounted.directory)
    while True:
        try:
            answer = answer_within((directory / ".stepfs/leave").stat, asked_as=mounted.asked_as)
            if isinstance(answer, OSError) and answer.errno == errno.EBUSY:
                raise answer
            return unmount(directory, lazy=False)
        except OSError as error:
            if error.errno == errno.EINVAL:  # another one was faster
                return None
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(_BUSY_RETRY_S)


def _check_elsewhere(mounted: Mounted, daemon: Daemon) -> None:
    """`StepfsError` if the daemon goes on because its own mount namespace has this mount at another place, too."""
    try:
        left = mounts(Path(f"/proc/{daemon.pid}/mountinfo")) if daemon.alive() else []
    except OSError:
        return  # it has just ended
    places = [each.directory for each in left if each.device == mounted.device]
    if places:
        here = _namespace("self") == _namespace(daemon.pid)
        enter = () if here else ("nsenter", "--mount", "--target", daemon.pid)
        by_hand = command(*enter, "umount", places[0]) if enter else command("stepfs", "unmount", places[0])
        raise StepfsError(
            f"{mounted.directory} is unmounted, but its daemon (pid {daemon.pid}) goes on: it is mounted at"
            f" {', '.join(places)}, too; end it with `{by_hand}`"
        )


def _namespace(process: int | str) -> str:
    return os.readlink(f"/proc/{process}/ns/mnt")  # noqa: PTH115 (text, not a path)


def _pidfds(daemon: Daemon, mounted: Mounted) -> list[int]:
    """Of the daemon, if it is of this pid namespace, and of its keeper, if it can be asked. Else only the cache directory can be
    watched.
    """
    found: list[int] = []
    with suppress(OSError):
        found += [os.pidfd_open(daemon.pid)] if daemon.alive() else []
    if found and not daemon.alive():
        os.close(found.pop())
    keeper = keeper_of(mounted)
    return found if keeper is None else [*found, keeper]


def _wait(daemon: Daemon, log: Path, descriptors: list[int], deadline: float) -> None:
    for descriptor in descriptors:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            hangs = "" if _answers(daemon.cache_dir) else f": its cache disk does not answer ({daemon.cache_dir})"
            who = f"the daemon (pid {daemon.pid})" if daemon.alive() else "its keeper"
            raise StepfsError(f"unmounted, but {who} has not ended{hangs}; look at {log}")
    if not _answers(daemon.cache_dir):
        raise StepfsError(f"unmounted, but the cache disk does not answer: {daemon.cache_dir} is left there; remove it")
    while daemon.cache_dir is not None and daemon.cache_dir.exists():
        if time.monotonic() > deadline:
            raise StepfsError(f"unmounted, but the cache {daemon.cache_dir} is still there; remove it")
        time.sleep(_GLANCE_S)


def _answers(place: Path | None) -> bool:
    return place is None or answer_within(place.exists) is not None


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
