"""mount(2) with a descriptor of /dev/fuse in one's own hand, as a helper with the right to mount does."""

from __future__ import annotations

import ctypes
import os

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8


def mount_with_descriptor(directory):
    """A mount of type fuse.stepfs at `directory`; returns the descriptor. Nobody answers on it yet."""
    directory.mkdir()
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.mount(
        b"stepfs", bytes(directory), b"fuse.stepfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, options.encode(),
    )  # fmt: skip
    assert done == 0, os.strerror(ctypes.get_errno())
    return descriptor
