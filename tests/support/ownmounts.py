"""Each process that runs tests has a mount namespace of its own, where that is allowed (it takes root).

Programs look at every mount of their namespace: `stepfs doctor`, `df`, a file manager. A mount that is looked at is
busy for that moment. Without this, tests that run beside each other would meet an EBUSY that none of them caused.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Final

from stepfs.mount.host.mount_points import unmount
from stepfs.mount.host.mount_table import FSTYPE, mounts

_CLONE_NEWNS: Final = 0x20000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 1 << 18


def enter_own_mount_namespace() -> bool:
    """Whether this process, and every process that it starts from now on, sees its own mounts only."""
    libc = ctypes.CDLL(None, use_errno=True)
    # A namespace belongs to a thread; /proc/self shows that of the main thread.
    if threading.current_thread() is not threading.main_thread() or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    if libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:  # else unmounting would propagate
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "/")
    for mounted in reversed(mounts()):  # copies of other processes' mounts
        if mounted.fstype == FSTYPE:
            unmount(Path(mounted.directory), lazy=True)
    return True
