"""Limits of the kernel and the cgroup: memory (primed pages count), and read-ahead."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stepfs.doctor.finding import Finding, note, ok
from stepfs.limits import cgroup_limit

_MEMORY_LOW: Final = 1 << 30


def check_kernel(root: Path = Path("/")) -> Iterator[Finding]:
    """Kernel release, and whether a mount can tune its FUSE settings."""
    yield ok("kernel", platform.release())
    if os.access(root / "sys/class/bdi", os.W_OK) and os.geteuid() == 0:
        yield ok("read-ahead", "may be raised per mount (/sys/class/bdi)")
    else:
        yield note(
            "read-ahead",
            "cannot be raised: reads arrive in 128 KiB pieces",
            "mount as root, or have an administrator write read_ahead_kb of the mount's bdi",
        )
    if (root / "sys/fs/fuse/connections").is_dir():
        yield ok("fusectl", "/sys/fs/fuse/connections is there")
    else:
        yield note(
            "fusectl",
            "/sys/fs/fuse/connections is not mounted: a hung mount cannot be aborted",
            "as root: mount -t fusectl none /sys/fs/fuse/connections",
        )


def check_memory(root: Path = Path("/")) -> Finding:
    """The cgroup's limit counts daemon memory and primed page cache together."""
    limit = cgroup_limit(root)
    if limit is None:
        return ok("memory", "no cgroup limit")
    text = f"cgroup limit {limit / (1 << 30):.1f} GiB"
    if limit < _MEMORY_LOW:
        return note("memory", text, "primed pages count against it too: raise the limit, or use --no-prime")
    return ok("memory", text)
