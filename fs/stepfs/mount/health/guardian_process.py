"""The guardian's own program: wait for the daemon's death, then cut its connection.

stdin: a pipe from the daemon, whose end means that it needs no guardian; stdout: one line as soon as the guardian watches.
The kernel sends PR_SET_PDEATHSIG when the *thread* that started this process ends.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress

from stepfs.mount.host.abort import abort_mount

_PR_SET_PDEATHSIG = 1
_DEATH = signal.SIGUSR1
_WORDS = b"stepfs: the daemon died; its connection was aborted, so that readers fail and do not hang\n"


def main(arguments: list[str]) -> int:
    """`parent pid`, `abort descriptor or -1`, `mount id`, `directory`."""
    parent, handle, mount_id = (int(argument) for argument in arguments[:3])
    directory = arguments[3]

    def cut_connection(*_: object) -> None:
        done = False
        with suppress(OSError):
            done = handle >= 0 and os.write(handle, b"1") == 1
        if not done:
            done = abort_mount(directory, mount_id)
        with suppress(OSError):
            os.write(2, _WORDS if done else b"")
        os._exit(0)

    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)  # meant for the daemon; it ends this process itself
    signal.signal(_DEATH, cut_connection)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(_DEATH), 0, 0, 0) != 0:
        return 1
    if os.getppid() != parent:
        cut_connection()
    os.write(1, b"watching\n")
    while os.read(0, 1):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
