"""Facts about other processes from /proc: whether a caller has a pending signal, and when a process started.

The kernel's FUSE_INTERRUPT is of no use here (libfuse hides it from us), and a LOOKUP that waits in the daemon cannot
be killed. So we poll the caller's pending signals. A thread with a pending signal that it has not blocked gets EINTR:
Python and SA_RESTART callers of the C library then retry, and SIGKILL ends the thread.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

_log = logging.getLogger("stepfs.mount")

_FIELDS = ("SigPnd:", "ShdPnd:", "SigBlk:")


def has_pending_signal(pid: int) -> bool:
    """Whether thread `pid` has a deliverable pending signal; False for one in a namespace that we cannot see."""
    if pid <= 0:
        _say_that_callers_are_hidden()
        return False
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = {}
    for line in text.splitlines():
        name, _, value = line.partition("\t")
        if name in _FIELDS:
            masks[name] = int(value, 16)
    pending = masks.get("SigPnd:", 0) | masks.get("ShdPnd:", 0)
    return bool(pending & ~masks.get("SigBlk:", 0))


@functools.cache  # once per daemon
def _say_that_callers_are_hidden() -> None:
    _log.warning(
        "a reader waits whose process is in another pid namespace: it cannot be killed until its wait is over; share the"
        " namespace (Kubernetes: shareProcessNamespace or hostPID, Docker: --pid)"
    )


def process_start(pid: int) -> int | None:
    """The start of a process, in clock ticks since boot: distinguishes it from a later process with the same pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
