"""The daemon that `stepfs mount` starts, forked from an interpreter that is loaded instead of started afresh.

`serve` runs in the process that forks, which has only imported; `Forks` takes the place of `subprocess` in
`stepfs.mount.daemon`, in the command's process. Between them is a socket: a message starts a daemon or waits for one.
`test_warm` holds the forked daemon against a fresh one.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import forkedprogram

# Changed in each command and each daemon that is forked: {"MODULE:NAME": value}, as JSON.
CONSTANTS: Final = "TESTS_CONSTANTS"
_DAEMON: Final = "stepfs.mount.daemon"
_MESSAGE_BYTES_MAX: Final = 1 << 17
_DESCRIPTORS_MAX: Final = 8
_ASIDE: Final = 200  # above every number that a descriptor of a command has


class Forked:
    """As much of `subprocess.Popen` as `stepfs.mount.daemon` uses."""

    def __init__(self, channel: socket.socket, pid: int, stdin: IO[bytes]) -> None:
        self._channel = channel
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None

    def wait(self) -> int:
        """The exit code, once the daemon has ended."""
        self._channel.send(json.dumps({"wait": self.pid}).encode())
        self.returncode = int(self._channel.recv(64))
        return self.returncode


class Forks:
    """As much of the module `subprocess` as `stepfs.mount.daemon` uses."""

    PIPE = subprocess.PIPE

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def Popen(  # noqa: N802 (subprocess's name)
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        cwd: str,
        start_new_session: bool,
        pass_fds: Sequence[int],
    ) -> Forked:
        """Start the daemon; other options than these would have to be understood here."""
        assert (list(command[:3]), stdin) == ([sys.executable, "-m", _DAEMON], subprocess.PIPE)
        assert start_new_session
        read_end, write_end = os.pipe()
        message = {
            "arguments": list(command[3:]),
            "env": dict(os.environ),
            "cwd": cwd,
            "numbers": [0, 1, 2, *pass_fds],
        }
        body = json.dumps(message).encode()
        assert len(body) <= _MESSAGE_BYTES_MAX
        socket.send_fds(self._channel, [body], [read_end, stdout.fileno(), stderr.fileno(), *pass_fds])
        os.close(read_end)
        return Forked(self._channel, int(self._channel.recv(64)), os.fdopen(write_end, "wb"))


def serve(channel: socket.socket) -> None:
    """Fork daemons, and wait for them, until the command has ended. They live on."""
    while True:
        body, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES_MAX, _DESCRIPTORS_MAX)
        if not body:
            return
        message = json.loads(body)
        if "wait" in message:
            _, status = os.waitpid(message["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if not answer:
                os._exit(_daemon(message, descriptors))
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(b"%d" % answer)


def _daemon(message: Mapping[str, Any], descriptors: list[int]) -> int:
    """What an interpreter does with `-m stepfs.mount.daemon`, from its start to its end."""
    os.setsid()
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ASIDE) for descriptor in descriptors]
    wanted = dict(zip(message["numbers"], aside, strict=True))
    os.closerange(0, _ASIDE)
    for number, descriptor in wanted.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    forkedprogram.begin([_DAEMON, *message["arguments"]], message["env"], message["cwd"])

    def program() -> None:
        change_constants()
        sys.exit(importlib.import_module(_DAEMON).main(sys.argv[1:]))

    return forkedprogram.run(program)


def change_constants() -> None:
    """Give constants the values that this process's environment names."""
    for name, value in json.loads(os.environ.get(CONSTANTS, "{}")).items():
        module, _, constant = name.partition(":")
        there = importlib.import_module(module)
        assert hasattr(there, constant), f"{name} is no constant any more"
        setattr(there, constant, value)
