"""Unmounting: umount2(2) with the right to call it, `fusermount3 -u` without."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8


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
