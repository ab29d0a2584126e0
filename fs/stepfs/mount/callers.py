"""Whether the process behind a request still wants its answer.

The kernel's FUSE_INTERRUPT is of no use here (libfuse keeps it from us), and a LOOKUP that waits in the daemon
cannot be killed: so whoever waits is asked for. A thread with a signal pending that it has not blocked gets EINTR,
which Python and the C library's SA_RESTART callers turn into another try, and SIGKILL into an end.
"""

from __future__ import annotations

from pathlib import Path

_FIELDS = ("SigPnd:", "ShdPnd:", "SigBlk:")


def has_pending_signal(pid: int) -> bool:
    """Whether thread `pid` has a deliverable signal waiting; False for one we cannot see (another namespace)."""
    if pid <= 0:
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
