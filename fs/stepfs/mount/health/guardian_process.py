"""The guardian's own program: it waits for the daemon's death, then has the next one serve, or cuts the connection.

Where the kernel sends unanswered requests again, one guardian lives as long as the mount. stdin is a socket to the daemon
that started it; it holds the device, and watches a thread of each daemon that does nothing: it ends at once, also if
others hang in the mount itself. What a daemon says:

    {"thread"}   of the first, with its order: watch it
    {"go"}       of a follower, or by the one that is replaced of the one that takes over, with its socket and its order
    {"bye"}      the mount ends. The end of the socket without it is a death, or has given the mount away

Elsewhere stdin is a pipe, whose end means that no guardian is needed, and PR_SET_PDEATHSIG tells of the death of the
*thread* that started this process. stdout: one line as soon as the guardian watches.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from stepfs.mount.host.abort import abort_mount
from stepfs.mount.host.messages import pair, read_document, receive, send

_PR_SET_PDEATHSIG = 1
_DEATH = signal.SIGUSR1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # meant for the daemon; it ends this process itself
_SUPERVISED_S = 2.0
_PAUSE_S = 1.0  # at least, after a daemon that found no store
_PAUSE_SHARE = 1 / 8  # of the time since the death, if that is more
_WORDS = b"stepfs: the daemon died; its connection was aborted, so that readers fail and do not hang\n"


def main(arguments: list[str]) -> int:
    """`parent pid`, `abort descriptor or -1`, `mount id`, `directory`."""
    parent, handle, mount_id = (int(argument) for argument in arguments[:3])
    directory = arguments[3]

    def cut_connection(*_: object) -> NoReturn:
        done = False
        with suppress(OSError):
            done = handle >= 0 and os.write(handle, b"1") == 1
        if not done:
            done = abort_mount(directory, mount_id)
        with suppress(OSError):
            os.write(2, _WORDS if done else b"")
        os._exit(0)

    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    if stat.S_ISSOCK(os.fstat(0).st_mode):
        if handle >= 0:
            os.set_inheritable(handle, False)
        hold(socket.socket(fileno=0), cut_connection)
        return 0
    signal.signal(_DEATH, cut_connection)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(_DEATH), 0, 0, 0) != 0:
        return 1
    if os.getppid() != parent:
        cut_connection()
    os.write(1, b"watching\n")
    while os.read(0, 1):
        pass
    return 0


def hold(first: socket.socket, cut: Callable[[], object]) -> None:
    """Watch one daemon after the other, until one says that the mount ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a follower
    keeper = Keeper()
    keeper.take(first)
    os.write(1, b"watching\n")
    deaths: list[float] = []
    while not keeper.watch() and keeper.order and not (keeper.order["supervised"] and keeper.has_ended()):
        limits, now = keeper.order["limits"], time.monotonic()
        deaths = [at for at in deaths if now - at < limits["within_s"]] + [now]
        if not keeper.order["recover"] or len(deaths) >= limits["deaths"] or not keeper.recover():
            if not keeper.is_over():
                cut()
            return


class Keeper:
    """The daemons that serve one mount: mostly one; two while one replaces the other."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = {}
        self._file = -1  # of the order: how to start the next daemon
        self._held: list[int] = []  # the device, the papers, and the lock of the cache
        self._served = -1  # a pidfd of the one that served last
        self._until = self._at_most = 0.0  # when the next one must serve; the same while the store does not answer
        self._daemons: dict[socket.socket, int] = {}  # the idle threads' pidfds

    def take(self, daemon: socket.socket) -> None:
        """A daemon's own word that it serves, with its order."""
        said, descriptors = receive(daemon)
        self._follow(daemon, said, descriptors)

    def _follow(self, daemon: socket.socket, said: dict[str, Any], descriptors: list[int]) -> None:
        for old in (self._file, self._served, *self._held):
            if old >= 0:
                os.close(old)
        if not said:
            return
        self._file, *self._held = descriptors
        self.order, self._served = read_document(os.dup(self._file)), -1
        with suppress(OSError):  # it has died
            self._served = os.pidfd_open(self.order["pid"])
            self._daemons[daemon] = os.pidfd_open(said["thread"], os.O_EXCL)  # PIDFD_THREAD

    def _remove(self, daemon: socket.socket) -> None:
        os.close(self._daemons.pop(daemon))
        daemon.close()

    def watch(self) -> bool:
        """Return once nobody serves: whether that is the mount's end."""
        ends = False
        while self._daemons:
            watched: list[Any] = [*self._daemons, *self._daemons.values()]
            ready = select.select(watched, [], [])[0]
            for daemon, thread in list(self._daemons.items()):
                if daemon in ready:
                    said, descriptors = receive(daemon)
                    if "go" in said:
                        self._follow(socket.socket(fileno=descriptors[0]), said, descriptors[1:])
                        continue
                    ends = "bye" in said
                elif thread not in ready:
                    continue
                else:
                    ends = False
                self._remove(daemon)
        return ends

    def has_ended(self) -> bool:
        """Whether the process of the dead daemon ends by itself; not while a thread of it hangs in the mount. A supervisor
        starts the next one then, and ends this process.
        """
        return self._served < 0 or bool(select.select([self._served], [], [], _SUPERVISED_S)[0])

    def is_over(self, within_s: float = 0.0) -> bool:
        """Whether the connection has ended, or does within this time."""
        poll = select.poll()
        poll.register(self._held[0], 0)
        return bool(poll.poll(1000 * within_s))

    def recover(self) -> bool:
        """Have a new daemon serve what the dead one left. False if none can.

        One that finds no store has not failed: readers wait for the store as they do while a daemon serves.
        """
        limits, began, failed = self.order["limits"], time.monotonic(), 0
        self._until, self._at_most = began + limits["patience_s"], began + limits["unreachable_s"]
        while failed < limits["attempts"] and time.monotonic() < self._until and not self.is_over():
            said = self._start()
            if "pid" in said:
                return True
            if said.get("exit_code") == limits["unreachable"]:
                self._until = self._at_most
                self.is_over(max(_PAUSE_S, _PAUSE_SHARE * (time.monotonic() - began)))
            else:
                failed += 1
        return False

    def _start(self) -> dict[str, Any]:
        """The new daemon's last word: that it serves, or why not; nothing if it is late, or has died."""
        ours, theirs = pair()
        os.set_inheritable(theirs.fileno(), True)
        os.lseek(self._file, 0, os.SEEK_SET)
        command = [*self.order["command"], str(theirs.fileno()), self.order["directory"], "follow"]
        try:
            process = os.posix_spawn(
                command[0],
                command,
                self.order["environment"],
                file_actions=[(os.POSIX_SPAWN_DUP2, self._file, 0), (os.POSIX_SPAWN_DUP2, 2, 1)],
                setsid=True,
                setsigdef=[*_ENDING, signal.SIGCHLD, signal.SIGPIPE],
            )
        except OSError as error:
            ours.close()
            with suppress(OSError):  # the log's disk may be full
                os.write(2, f"stepfs: cannot start the next daemon, {command[0]}: {error.strerror}\n".encode())
            return {}
        finally:
            theirs.close()
        with ours:
            said = self._heard(ours) if send(ours, {}, self._held) else {}
        if "pid" in said:
            return said
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        for daemon, thread in list(self._daemons.items()):
            select.select([thread], [], [])  # else two might read
            self._remove(daemon)
        return said

    def _heard(self, daemon: socket.socket) -> dict[str, Any]:
        while True:
            watched: list[Any] = [daemon, *self._daemons.values()]
            ready = select.select(watched, [], [], max(0.0, self._until - time.monotonic()))[0]
            if daemon not in ready:
                return {}
            said, descriptors = receive(daemon)
            if "go" in said:
                self._follow(socket.socket(fileno=descriptors[0]), said, descriptors[1:])
                send(daemon, {"yours": True, "guarded": True})
            elif "waiting" in said:
                self._until = self._at_most if said["silent"] else self._until
            else:
                return said


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
