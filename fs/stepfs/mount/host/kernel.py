"""What the kernel says of processes in /proc, and what it lets us set in /sys where no mount option would do."""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path
from typing import Final, Literal

_log = logging.getLogger("stepfs.mount")

_SIGNALS: Final = re.compile(rb"^SigPnd:\t(\w+)\nShdPnd:\t(\w+)\nSigBlk:\t(\w+)$", re.MULTILINE)
_STATUS_BYTES_MAX: Final = 8192

READ_AHEAD_KB: Final = 4096
MAX_BACKGROUND: Final = 64
CONGESTION_THRESHOLD: Final = 48


def has_pending_signal(pid: int) -> bool:
    """Whether thread `pid` has a deliverable pending signal; False for one in a namespace that we cannot see."""
    if pid <= 0:
        _say_that_callers_are_hidden()
        return False
    try:
        status = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = _SIGNALS.search(os.read(status, _STATUS_BYTES_MAX))
    except OSError:  # the thread has ended meanwhile
        return False
    finally:
        os.close(status)
    own, of_process, blocked = (int(mask, 16) for mask in found.groups()) if found else (0, 0, 0)
    return bool((own | of_process) & ~blocked)


@functools.cache  # once per daemon
def _say_that_callers_are_hidden() -> None:
    _log.warning(
        "a reader waits whose process is in another pid namespace: it cannot be killed until its wait is over; share the"
        " namespace (Kubernetes: shareProcessNamespace or hostPID, Docker: --pid)"
    )


def process_start(pid: int | Literal["self"]) -> int | None:
    """The start of a process, in clock ticks since boot: distinguishes it from a later process with the same pid, and from
    that of another pid namespace. "self": /proc may be that of another one.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def lineage(thread: int) -> list[int]:
    """The process of a thread, its parent, and so on up to pid 1; empty if it is gone, or of another pid namespace."""
    found: list[int] = []
    while thread > 0:
        try:
            status = Path(f"/proc/{thread}/status").read_text()
        except OSError:
            break
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        found.append(int(facts["Tgid"]))
        thread = int(facts["PPid"])
    return found


def tune(device: str, *, sysfs: Path = Path("/sys")) -> dict[str, int | None]:
    """Tune the mount with this device number ("0:53"), as far as permitted. The values in effect; None: unreadable."""
    connection = sysfs / "fs/fuse/connections" / device.partition(":")[2]
    wanted = {
        "read_ahead_kb": (sysfs / "class/bdi" / device / "read_ahead_kb", READ_AHEAD_KB),
        "max_background": (connection / "max_background", MAX_BACKGROUND),
        "congestion_threshold": (connection / "congestion_threshold", CONGESTION_THRESHOLD),
    }
    refused = [name for name, (path, value) in wanted.items() if not _write(path, value)]
    if refused:
        # Expected without privilege, and where fusectl is not mounted; else a sandbox an operator may want to open.
        surprising = os.geteuid() == 0 and any(wanted[name][0].exists() for name in refused)
        level = logging.WARNING if surprising else logging.INFO
        _log.log(
            level,
            "the kernel's defaults stay for %s (sysfs cannot be written): reads are slower",
            ", ".join(refused),
        )
    return {name: _read(path) for name, (path, _) in wanted.items()}


def _write(path: Path, value: int) -> bool:
    try:
        path.write_text(str(value))
    except OSError:
        return False
    return True


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
