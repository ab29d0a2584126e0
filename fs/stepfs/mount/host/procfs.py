"""What /proc says of other processes: whether the one behind a request still wants its answer, and since when it runs.

The kernel's FUSE_INTERRUPT is of no use here (libfuse keeps it from us), and a LOOKUP that waits in the daemon
cannot be killed: so whoever waits is asked for. A thread with a signal pending that it has not blocked gets EINTR,
which Python and the C library's SA_RESTART callers turn into another try, and SIGKILL into an end.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

_log = logging.getLogger("stepfs.mount")

_FIELDS = ("SigPnd:", "ShdPnd:", "SigBlk:")


def has_pending_signal(pid: int) -> bool:
    """Whether thread `pid` has a deliverable signal waiting; False for one we cannot see (another namespace)."""
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
    """When a process started, in clock ticks since boot: tells it from a later one with its number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
