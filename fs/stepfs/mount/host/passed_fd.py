"""A mount that another process made: its descriptor of /dev/fuse, given as the directory `/dev/fd/N`.

For pods that may not mount. A privileged helper opens /dev/fuse, calls mount(2) with type `fuse.stepfs`, the flags
MS_NOSUID, MS_NODEV, MS_NOEXEC and MS_RDONLY and the options `fd=N,rootmode=40000,user_id=U,group_id=G,
default_permissions`, and lets `stepfs mount LAKE /dev/fd/N` inherit the descriptor. The mount itself may be invisible
here, so features that need its path are off: priming, kernel settings, noticing `umount -l`. The helper unmounts.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from stepfs.errors import RefusedError

_DESCRIPTORS: Final = Path("/dev/fd")
_FUSE: Final = os.makedev(10, 229)  # /dev/fuse, by the kernel's devices.txt


def descriptor_of(directory: Path) -> int | None:
    """N of `/dev/fd/N`; None for any other path."""
    name = directory.name
    if directory.parent != _DESCRIPTORS or not (name.isascii() and name.isdigit() and len(name) < 10):
        return None
    return int(name)


def check(descriptor: int) -> None:
    """`RefusedError` unless this process holds /dev/fuse there."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        status = None
    if status is None or not stat.S_ISCHR(status.st_mode) or status.st_rdev != _FUSE:
        raise RefusedError(
            f"{_DESCRIPTORS / str(descriptor)} is not an open /dev/fuse; let the process that mounted leave it open"
        )
