"""A small process without /dev/fuse that aborts the connection when the daemon dies.

No thread of a daemon calls into its own mount unless another process can cut the connection; `start` returns whether
one can.
"""

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import trio

import stepfs
from stepfs.mount.host.abort import may_force_unmount

_log = logging.getLogger("stepfs.mount")

_READY_S: Final = 30.0
_GONE_S: Final = 5.0
# Isolated from the user's environment, and without site-packages: 15 ms and 8 MB.
_PROGRAM: Final = "import sys; sys.path.append(sys.argv.pop(1)); from stepfs.mount.health.guardian_process import main; sys.exit(main(sys.argv[1:]))"


class Guardian:
    """Guards one mount inside the context. Enter, start and leave in the main thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    async def start(self, mount_id: int, handle: int | None) -> bool:
        """Start guarding the mount `mount_id`, with the abort descriptor `handle` if there is one.

        False if this user has neither way to cut a connection, or if no process can be started.
        """
        if handle is None and not may_force_unmount():
            return False
        command = [
            *(sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(stepfs.__file__).parent.parent)),
            *(str(os.getpid()), str(-1 if handle is None else handle), str(mount_id), str(self._directory)),
        ]
        # Not in a worker thread: the guardian gets its signal at the death of the thread that starts it.
        try:
            process = self._process = subprocess.Popen(  # noqa: S603, ASYNC220 (this interpreter, our own module; see above)
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
                pass_fds=() if handle is None else (handle,),
            )
        except OSError as error:
            _log.warning("no guardian for %s: %s", self._directory, error)
            return False
        assert process.stdout is not None
        with trio.move_on_after(_READY_S):
            await trio.lowlevel.wait_readable(process.stdout.fileno())
            return bool(os.read(process.stdout.fileno(), 16))
        return False

    async def ended(self) -> None:
        """Return when the guardian that was started has been killed."""
        assert self._process is not None
        descriptor = os.pidfd_open(self._process.pid)
        try:
            await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)
