"""Cutting a FUSE connection: every request that waits on it ends with an error, now and later.

It imports little, because the guardian consists of this module and a signal handler.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

CAP_SYS_ADMIN = 1 << 21  # to mount, and to abort connections
CONNECTIONS = "/sys/fs/fuse/connections"
_MNT_FORCE = 1
_MNT_DETACH = 2
_FUSERMOUNT = ("/usr/bin/fusermount3", "/bin/fusermount3", "/usr/local/bin/fusermount3")


@contextlib.contextmanager
def abort_handle(device: str, connections: str | os.PathLike[str] = CONNECTIONS) -> Iterator[int | None]:
    """A descriptor that aborts the connection of the mount `device` ("0:53") when "1" is written to it.

    Opened while the mount stands: once it is detached, the next mount may get its number, and must not be aborted in
    its place. None if fusectl is not writable.
    """
    try:
        path = f"{os.fspath(connections)}/{device.partition(':')[2]}/abort"
        found = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield found
    finally:
        os.close(found)


def capabilities(which: str, root: Path = Path("/")) -> int | None:
    """One of the capability sets ("CapEff", "CapBnd") as bits; None if the kernel does not show it."""
    try:
        lines = (root / "proc/self/status").read_text(errors="replace").splitlines()
        return next((int(line.split()[1], 16) for line in lines if line.startswith(f"{which}:")), None)
    except (OSError, ValueError, IndexError):
        return None


def may_force_unmount() -> bool:
    """Whether this process may call umount2(2): it has CAP_SYS_ADMIN in effect."""
    return bool((capabilities("CapEff") or 0) & CAP_SYS_ADMIN)


def abort_mount(directory: str, mount_id: int) -> bool:
    """Abort the connection of the mount `mount_id` at `directory` through MNT_FORCE; the mount stays, dead.

    False if another mount, or none, is at `directory` now, or the right is missing. Never waits for its daemon.
    """
    try:
        # O_PATH on a mount's root sends no request to its file system.
        pinned = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if _mount_id_of(pinned) != mount_id:
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        libc.umount2(f"/proc/self/fd/{pinned}".encode(), _MNT_FORCE)  # fails with EBUSY because of `pinned`
    finally:
        os.close(pinned)
    return may_force_unmount()


def _mount_id_of(descriptor: int) -> int | None:
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("mnt_id:")), None)


def places_of(device: str) -> list[tuple[str, int]]:
    """Where the mount "0:53" can be seen from here: (directory, mount id). It may be bound elsewhere, or renamed."""
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n"):
        words = line.split(b" ", 5)
        if len(words) == 6 and words[2] == device.encode():
            found.append((os.fsdecode(words[4].decode("unicode_escape").encode("latin-1")), int(words[0])))
    return found


def detach(device: str) -> None:
    """Take the mount away wherever it can be seen from here. It never waits for its daemon."""
    libc = ctypes.CDLL(None, use_errno=True)
    for directory, _ in places_of(device):
        if libc.umount2(os.fsencode(directory), _MNT_DETACH) == 0:
            continue
        for program in _FUSERMOUNT:  # not root
            with contextlib.suppress(OSError):
                pid = os.posix_spawn(program, [program, "-u", "-z", "--", directory], dict(os.environ))
                os.waitpid(pid, 0)
                break
