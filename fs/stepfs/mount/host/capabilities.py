"""The rights of this process, as the kernel reports them. It imports little: the guardian reads it, too."""

from __future__ import annotations

from pathlib import Path

CAP_SYS_ADMIN = 1 << 21  # to mount, and to abort connections


def capabilities(which: str, root: Path = Path("/")) -> int | None:
    """One of the capability sets ("CapEff", "CapBnd") as bits; None if the kernel does not show it."""
    try:
        lines = (root / "proc/self/status").read_text(errors="replace").splitlines()
        return next((int(line.split()[1], 16) for line in lines if line.startswith(f"{which}:")), None)
    except (OSError, ValueError, IndexError):
        return None
