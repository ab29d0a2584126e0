"""Mounts and places for them: the mount table, checking, claiming, clearing of dead mounts, unmounting.

A mount that another process made is passed in as its descriptor of /dev/fuse, named by the directory `/dev/fd/N`.
"""

import ctypes
import enum
import errno
import fcntl
import itertools
import logging
import os
import shutil
import stat
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from stepfs._internal.control_files import Identity, answer_within
from stepfs.errors import AbsentError, RefusedError, command
from stepfs.mount.host.abort import abort_handle, abort_mount
from stepfs.mount.host.mount_table import FSTYPE, Mounted, mount_at

_log = logging.getLogger("stepfs.mount")

_FUSE: Final = os.makedev(10, 229)  # /dev/fuse, by the kernel's devices.txt

_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8

_NAMES: Final = 8
_DEAD: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
_FORMER: Final = "user.stepfs.mode"  # of a closed mount point: its mode before
_CLAIM_S: Final = 20.0
_CLAIM_POLL_S: Final = 0.05
_STACK_MAX: Final = 16


def check_passed(descriptor: int) -> None:
    """`RefusedError` unless this process holds /dev/fuse there."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        status = None
    if status is None or not stat.S_ISCHR(status.st_mode) or status.st_rdev != _FUSE:
        raise RefusedError(f"/dev/fd/{descriptor} is not an open /dev/fuse; let the process that mounted leave it open")


def unmount(directory: Path, *, lazy: bool) -> None:
    """Unmount the topmost mount at `directory`. OSError: EBUSY (not lazy), EINVAL (nothing mounted), EPERM."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    if libc.umount2(os.fsencode(directory), flags) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EPERM and os.geteuid() != 0:
        _fusermount(directory, lazy=lazy)
        return
    raise OSError(code, os.strerror(code), str(directory))


def _fusermount(directory: Path, *, lazy: bool) -> None:
    program = shutil.which("fusermount3") or shutil.which("fusermount")
    if program is None:
        raise OSError(errno.EPERM, "fusermount3 is not installed", str(directory))
    command = [program, "-u", *(["-z"] if lazy else []), "--", str(directory)]
    done = subprocess.run(  # noqa: S603 (a fixed program, the path behind "--")
        command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode:
        busy = "busy" in done.stderr.lower()
        raise OSError(errno.EBUSY if busy else errno.EPERM, done.stderr.strip() or "fusermount3 failed", str(directory))


def list_within(directory: Path, asked_as: Identity | None = None, *, device: str = "") -> list[str] | OSError | None:
    """Some names of a directory; the error, if any; None if it did not answer in time.

    Only a few names: a root of 10⁶ steps takes many seconds to list, and its first names prove as much.
    """

    def names() -> list[str]:
        with os.scandir(directory) as found:
            return [entry.name for entry in itertools.islice(found, _NAMES)]

    return answer_within(names, asked_as=asked_as, device=device)


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
    answer = list_within(Path(mounted.directory) / below, mounted.asked_as, device=mounted.device)
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


def close_behind(directory: Path) -> None:
    """Refuse opens below a mount point that was just left: EACCES, and not as if the step were not committed.

    Until `reopen`. Root looks in nevertheless. Does nothing where the file system keeps no attributes of users.
    """
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            os.fchmod(descriptor, 0)
            try:
                os.setxattr(descriptor, _FORMER, b"%o" % mode)
            except OSError:
                os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)


def is_closed(directory: Path) -> bool:
    """Whether `close_behind` has closed it."""
    with suppress(OSError):
        return stat.S_IMODE(directory.stat().st_mode) == 0 and os.getxattr(directory, _FORMER) is not None
    return False


def reopen(directory: Path) -> bool:
    """Give a mount point that `close_behind` has closed its mode back; False for any other directory."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        place = Path(f"/proc/self/fd/{descriptor}")
        try:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) == 0:
                place.chmod(0o700)  # to read the attribute
                try:
                    mode = int(os.getxattr(place, _FORMER), 8)
                except OSError:
                    place.chmod(0)
                    raise
                place.chmod(mode)
                os.removexattr(place, _FORMER)
                return True
        finally:
            os.close(descriptor)
    return False


def prepare(directory: Path) -> None:
    """Ensure an empty directory to mount on; detach dead mounts of ours. `directory` is a real path.

    `AbsentError` if there is no such directory, `RefusedError` if it is in use, not empty or not a directory.
    """
    _clear_dead_mounts(directory)
    reopen(directory)
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
        time.sleep(_CLAIM_POLL_S)


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
