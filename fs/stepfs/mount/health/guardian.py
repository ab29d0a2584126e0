"""A small process beside the daemon that has the next one serve when it dies, or cuts the connection.

No thread of a daemon calls into its own mount unless another process can cut the connection; `start` returns whether
one can.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import trio

import stepfs
from stepfs.errors import StoreUnreachableError
from stepfs.mount.host.abort import may_force_unmount
from stepfs.mount.host.messages import document, pair, send
from stepfs.mount.options import DEADLINE_S

_log = logging.getLogger("stepfs.mount")

_READY_S: Final = 30.0
_GONE_S: Final = 5.0
# When the guardian gives up, and cuts the connection.
ATTEMPTS: Final = 5  # in a row to have another daemon serve
DEATHS: Final = 3  # within this time: what kills them may be a request, which the next one gets, too
WITHIN_S: Final = 60.0
PATIENCE_S: Final = 30.0  # for a daemon that serves; where the store is away, as long as a read waits for it
# Isolated from the user's environment, and without site-packages: 25 ms and 11 MB.
_PROGRAM: Final = "import sys; sys.path.append(sys.argv.pop(1)); from stepfs.mount.health.guardian_process import main; sys.exit(main(sys.argv[1:]))"


def idle_thread() -> int:
    """The number of a thread that does nothing: it ends at once with this process, whatever the others wait for."""
    thread = threading.Thread(target=threading.Event().wait, name="stepfs idle", daemon=True)
    thread.start()
    assert thread.native_id is not None
    return thread.native_id


def order(directory: Path, options: str, *, recover: bool) -> int:
    """What the guardian needs to start the next daemon, as a descriptor. Credentials are in it: it has no name."""
    return document(
        {
            "command": [sys.executable, "-m", "stepfs.mount.daemon"],
            "environment": {name: value for name, value in os.environ.items() if name != "WATCHDOG_PID"},
            "directory": str(directory),
            "options": options,
            "pid": os.getpid(),
            "recover": recover,
            "supervised": "NOTIFY_SOCKET" in os.environ,
            "limits": {
                "attempts": ATTEMPTS,
                "deaths": DEATHS,
                "within_s": WITHIN_S,
                "patience_s": PATIENCE_S,
                "unreachable": StoreUnreachableError.exit_code,
                "unreachable_s": DEADLINE_S,
            },
        }
    )


def may_cut(handle: int | None) -> bool:
    """Whether this user has one of the ways to cut a connection; `handle` is an abort descriptor."""
    return handle is not None or may_force_unmount()


class Guardian:
    """Guards one mount inside the context. Enter, start and leave in the main thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # of a guardian that can have another daemon serve

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        process, control = self._process, self._control
        if control is not None:
            send(control, {"bye": True})
            control.settimeout(_GONE_S)
            with suppress(OSError):
                control.recv(1)  # its end
            control.close()
        if process is None:
            return
        assert process.stdout is not None
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def holds(self) -> bool:
        """Whether it can have another daemon serve."""
        return self._control is not None

    def join(self, thread: int, descriptors: Sequence[int]) -> bool:
        """Let it watch the daemon that takes over, too: its socket, its order, and what the guardian holds."""
        return self._control is not None and send(self._control, {"go": True, "thread": thread}, descriptors)

    def adopt(self, control: socket.socket) -> None:
        """Be watched by the guardian of the daemon before."""
        self._control = control

    def give_up(self) -> None:
        """The mount is another daemon's, and so is the guardian that can follow."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._control is not None:
            trio.lowlevel.notify_closing(self._control)
            self._control.close()
            self._control = None
            if self._process is not None:
                assert self._process.stdout is not None
                self._process.stdout.close()
                self._process.returncode = 0  # it lives on by itself: suppresses Popen's ResourceWarning
                self._process = None

    async def start(self, mount_id: int, handle: int | None, descriptors: Sequence[int]) -> bool:
        """Start guarding the mount `mount_id`, with the abort descriptor `handle` if there is one.

        `descriptors`: the order and what is to be held; none where the kernel cannot send requests again. False if this
        user has neither way to cut a connection, or if no process can be started.
        """
        cuts = may_cut(handle)
        if not cuts and not descriptors:
            return False
        command = [
            *(sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(stepfs.__file__).parent.parent)),
            *(str(os.getpid()), str(-1 if handle is None else handle), str(mount_id), str(self._directory)),
        ]
        control, theirs = pair() if descriptors else (None, None)
        # Not in a worker thread: without a socket it gets its signal at the death of the thread that starts it.
        try:
            process = self._process = subprocess.Popen(  # noqa: S603, ASYNC220 (this interpreter, our own module; see above)
                command,
                stdin=subprocess.PIPE if theirs is None else theirs.fileno(),
                stdout=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
                pass_fds=() if handle is None else (handle,),
            )
        except OSError as error:
            _log.warning("no guardian for %s: %s", self._directory, error)
            return False
        finally:
            if theirs is not None:
                theirs.close()
        if control is not None:
            self._control = control
            send(control, {"thread": idle_thread()}, descriptors)
        assert process.stdout is not None
        with trio.move_on_after(_READY_S):
            await trio.lowlevel.wait_readable(process.stdout.fileno())
            return bool(os.read(process.stdout.fileno(), 16)) and cuts
        return False

    async def ended(self) -> None:
        """Return when the guardian has been killed."""
        if self._control is not None:
            try:
                await trio.lowlevel.wait_readable(self._control)
            except trio.ClosedResourceError:  # given up
                await trio.sleep_forever()
            return
        assert self._process is not None
        descriptor = os.pidfd_open(self._process.pid)
        try:
            await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)
