"""Limits of the kernel and the cgroup: memory (primed pages count), read-ahead, descriptors."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stepfs.data.memory.available import cgroup_limit
from stepfs.doctor.finding import Finding, note, ok

_MEMORY_LOW: Final = 1 << 30
_FILES_LOW: Final = 4096


def check_kernel(root: Path = Path("/")) -> Iterator[Finding]:
    """Kernel release, and the FUSE settings that a mount tunes or that limit it."""
    yield ok("kernel", platform.release())
    pages = _read(root / "proc/sys/fs/fuse/max_pages_limit")
    if pages is not None:
        yield ok("fuse.max_pages_limit", f"{pages} pages per request")
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


def check_descriptors() -> Finding:
    """Open files: each open file of a trainer is also one of the daemon if its slice is cached on disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} (hard limit {hard})"
    if 0 <= soft < _FILES_LOW:
        return note("open files", text, f"raise it: ulimit -n {_FILES_LOW}")
    return ok("open files", text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
