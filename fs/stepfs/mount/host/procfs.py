"""Facts about other processes from /proc: whether a caller has a pending signal, and when a process started.

The kernel's FUSE_INTERRUPT is of no use here (libfuse hides it from us), and a LOOKUP that waits in the daemon cannot
be killed. So we poll the caller's pending signals. A thread with a pending signal that it has not blocked gets EINTR:
Python and SA_RESTART callers of the C library then retry, and SIGKILL ends the thread.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path
from typing import Final

_log = logging.getLogger("stepfs.mount")

_SIGNALS: Final = re.compile(rb"^SigPnd:\t(\w+)\nShdPnd:\t(\w+)\nSigBlk:\t(\w+)$", re.MULTILINE)
_STATUS_BYTES_MAX: Final = 8192


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


def process_start(pid: int) -> int | None:
    """The start of a process, in clock ticks since boot: distinguishes it from a later process with the same pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
