"""A record of the process that serves a mount, for commands that meet a mount without an answer.

A mount that does not answer is cut off by force only with proof that its server is gone, because force ends the reads
of a healthy mount as well. The proof is a record of this boot, in this pid namespace, of a process that has ended. In
another pid namespace a record proves nothing. It identifies the mount by its whole mountinfo line, because the kernel
reuses device numbers, and a killed daemon leaves its record behind.

    /run/stepfs/<device>.json    or $XDG_RUNTIME_DIR/stepfs/…; of this user only, 0600, removed when the mount ends
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stepfs.mount.host.mountinfo import Mounted
from stepfs.mount.host.procfs import process_start

_log = logging.getLogger("stepfs.mount")

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_RECORD_BYTES_MAX: Final = 4096


def records_directory() -> Path | None:
    """The directory of this user's records; None for a user without a runtime directory."""
    if os.geteuid() == 0:
        return Path("/run/stepfs")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "stepfs" if runtime else None


@contextmanager
def recorded(mounted: Mounted | None, base: Path | None) -> Iterator[None]:
    """Inside the context `base` holds a record that this process serves the mount.

    Only the removal of a hanging mount depends on the record, so a failure to write it is only logged.
    """
    path = None
    if base is not None and mounted is not None:
        path = base / _name(mounted)
        body = {
            "mount": _identity(mounted),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
            "boot_id": _boot_id(),
            "pid_namespace": _pid_namespace(),
        }
        try:
            _write(path, json.dumps(body).encode())
        except OSError as error:
            _log.info("no record of who serves the mount: %s", error)
            path = None
    try:
        yield
    finally:
        if path is not None:
            with suppress(OSError):
                path.unlink()


def server_is_gone(mounted: Mounted, base: Path | None) -> bool:
    """Whether a record proves that the process that served this mount is gone. Without proof: False."""
    body = None if base is None else _read(base / _name(mounted))
    if body is None or body.get("mount") != _identity(mounted):
        return False
    if body.get("boot_id") != _boot_id() or body.get("pid_namespace") != _pid_namespace():
        return False
    pid, start = body.get("pid"), body.get("process_start")
    if not isinstance(pid, int) or not isinstance(start, int):
        return False
    return process_start(pid) != start or _is_zombie(pid)


def forget_server(mounted: Mounted, base: Path | None) -> None:
    """Remove the record that a killed daemon left, after its mount was cleared."""
    if base is not None and server_is_gone(mounted, base):
        with suppress(OSError):
            (base / _name(mounted)).unlink()


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _check_own(path.parent)
    with suppress(FileNotFoundError):
        path.unlink()  # of a killed daemon, whose device number is in use again
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, body)
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, object] | None:
    try:
        _check_own(path.parent)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return None
        body = json.loads(os.read(descriptor, _RECORD_BYTES_MAX))
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return body if isinstance(body, dict) else None


def _check_own(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a directory that only this user writes to")


def _is_zombie(pid: int) -> bool:
    """The main thread, which answers the kernel, has ended, though another thread may still hang."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in {"Z", "X"}


def _name(mounted: Mounted) -> str:
    return f"{mounted.device.replace(':', '-')}.json"


def _identity(mounted: Mounted) -> list[str | int]:
    return [mounted.device, mounted.mount_id, mounted.directory, mounted.source]


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (text, not a path)
    except OSError:
        return None
