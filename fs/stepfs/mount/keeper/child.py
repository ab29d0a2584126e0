"""A daemon, as its keeper sees it: one socket, and the descriptors that tell of its end."""

from __future__ import annotations

import os
import select
import signal
import socket
from contextlib import suppress
from typing import Any

from stepfs.mount.keeper.messages import close, pair, read_document

GONE_S = 10.0  # for a daemon that is killed
_SUPERVISOR = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")  # this process's own
_DEFAULT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)


class Child:
    """A daemon: of this process, or of the keeper before."""

    def __init__(self, sock: socket.socket, spec: int, how: str) -> None:
        self.sock, self.spec, self.how = sock, spec, how
        self.pid = 0
        self.thread = 0
        self.process = self.life = -1  # pidfds: of the process, and of a thread that ends at once with it
        self.ready = self.stopped = False
        self.asker: socket.socket | None = None
        self.last: dict[str, Any] = {}  # `ended`, or the last line about its waiting
        self.version = ""

    def meet(self, pid: int, thread: int = 0) -> None:
        """Know its process; and the thread which is gone at once, while others may hang in the mount itself."""
        self.pid, self.thread = pid, thread
        with suppress(OSError):  # it has died; the end of its socket says so, too
            if self.process < 0:
                self.process = os.pidfd_open(pid)
        if thread:
            with suppress(OSError):  # before Linux 6.9: no PIDFD_THREAD
                self.life = os.pidfd_open(thread, os.O_EXCL)

    @property
    def alive(self) -> int:
        """The descriptor that says when it reads no more."""
        return self.life if self.life >= 0 else self.process

    def kill(self) -> None:
        """SIGKILL, and return once it reads no more."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
        if self.alive >= 0:
            select.select([self.alive], [], [], GONE_S)

    def close(self) -> None:
        self.sock.close()
        close([self.process, self.life])


def spawn(how: str, spec: int, directory: str) -> Child:
    """Start a daemon, in a session of its own. OSError."""
    ours, theirs = pair()
    given = read_document(spec)
    os.set_inheritable(theirs.fileno(), True)
    command = [*given["command"], str(theirs.fileno()), directory]
    environment = {name: value for name, value in given["environment"].items() if name not in _SUPERVISOR}
    if "WATCHDOG_USEC" in os.environ:  # a daemon that is stuck ends before its supervisor ends it
        environment["WATCHDOG_USEC"] = os.environ["WATCHDOG_USEC"]
    null = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)
    try:
        pid = os.posix_spawn(
            command[0], command, environment, file_actions=[null, (os.POSIX_SPAWN_DUP2, 2, 1)], setsid=True,
            setsigmask=(), setsigdef=_DEFAULT,
        )  # fmt: skip
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    child = Child(ours, spec, how)
    child.meet(pid)
    return child
