"""The `stepfs` command in a process of its own, without the half second of importing: forked from one that is loaded.

Tests of real mounts start hundreds of commands, and are about what these do, not about how Python starts. Tests that
need another interpreter, user or namespace, and those of the console script itself (`test_cli_process`), start a fresh one.

As a program: the server. Each message on its socket is a command line with its environment and directory, and comes with
four descriptors: what the command's 0, 1 and 2 shall be, and a pipe for its pid and, when it has ended, its exit code.

The daemon that `stepfs mount` starts is forked as well: not from the command, which has run a part of stepfs and may
have threads, but from the process that looks after it, which has only imported.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import botodata
import forkeddaemon
import forkedprogram

_MESSAGE_BYTES_MAX: Final = 1 << 17
_READY: Final = b"ready"
_LOADED: Final = (
    "stepfs.cli.app",
    "stepfs.cli.target",
    "stepfs.lake.log.reader",
    "stepfs.lake.groups",
    "stepfs.mount.daemon",
    "stepfs.mount.session",
    "stepfs.mount.unmount",
    "stepfs.store.local.local_store",
    "stepfs.store.s3.s3_store",
    "trio",
)


def run(
    arguments: list[str], *, env: dict[str, str], timeout_s: float, fresh_daemon: bool = False
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run(["stepfs", *arguments], capture_output=True, text=True)`: returns when its output is closed.

    `fresh_daemon`: a mount's daemon is an interpreter of its own, as in earnest.
    """
    server = _server(tuple(sorted(item for item in env.items() if item[0].startswith("PYTHON"))))
    ends = [os.pipe() for _ in range(3)]
    with open(os.devnull, "rb") as nothing:
        message = {"arguments": arguments, "env": env, "cwd": os.getcwd(), "fresh_daemon": fresh_daemon}
        server.ask(message, [nothing.fileno(), *(write_end for _, write_end in ends)])
    for _, write_end in ends:
        os.close(write_end)
    texts, complete = _read([read_end for read_end, _ in ends], time.monotonic() + timeout_s)
    out, err, reply = texts
    pid, _, code = reply.partition("\n")
    if not complete:
        os.kill(int(pid), signal.SIGKILL)
        raise subprocess.TimeoutExpired(arguments, timeout_s, out, err)
    return subprocess.CompletedProcess(arguments, int(code), out, err)


def _read(descriptors: list[int], deadline: float) -> tuple[list[str], bool]:
    """What comes from each until it is closed, and whether all were in time. Closes them."""
    found = {descriptor: bytearray() for descriptor in descriptors}
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                data = os.read(key.fd, 1 << 16)
                found[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
        complete = not selector.get_map()
    for descriptor in descriptors:
        os.close(descriptor)
    return [text.decode(errors="replace") for text in found.values()], complete


class _Server:
    def __init__(self, python: dict[str, str]) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | python
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=env,
            )
        self._lock = threading.Lock()
        atexit.register(self._close)
        assert self._socket.recv(16) == _READY, "the server of commands ended while it loaded"

    def ask(self, message: Mapping[str, object], descriptors: list[int]) -> None:
        body = json.dumps(message).encode()
        assert len(body) <= _MESSAGE_BYTES_MAX
        with self._lock:
            socket.send_fds(self._socket, [body], descriptors)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _server(python: tuple[tuple[str, str], ...]) -> _Server:
    """One per set of variables that an interpreter reads when it starts."""
    return _Server(dict(python))


def main() -> None:
    """Serve until the tests that started this process are gone."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in _LOADED:
        importlib.import_module(module)
    botodata.preload()
    held = {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, requests.fileno()}
    assert len(held) == 1, "a fork would inherit what an import has opened"  # but for the listing itself
    assert threading.active_count() == 1, "a fork would lack a thread"
    requests.send(_READY)  # so that no command's time is spent on loading
    gc.freeze()  # a collection in a child would copy every page
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for whoever waits for a command
    while True:
        body, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES_MAX, 4)
        if not body:
            return
        if os.fork() == 0:
            requests.close()
            os._exit(_look_after(json.loads(body), descriptors))
        for descriptor in descriptors:
            os.close(descriptor)


def _look_after(message: dict[str, Any], descriptors: list[int]) -> int:
    """Start the command, fork its daemon, wait for it, and tell its exit code."""
    *standard, reply = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    forks, commands = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        os.close(reply)
        forks.close()
        if not message["fresh_daemon"]:
            daemon: Any = importlib.import_module("stepfs.mount.daemon")
            daemon.subprocess = forkeddaemon.Forks(commands)
        os._exit(_command(message, standard))
    commands.close()
    for descriptor in standard:
        os.close(descriptor)
    with suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(reply, b"%d\n" % pid)
        forkeddaemon.serve(forks)
        _, status = os.waitpid(pid, 0)
        os.write(reply, b"%d" % os.waitstatus_to_exitcode(status))
    return 0


def _command(message: dict[str, Any], standard: list[int]) -> int:
    """What an interpreter does with `from stepfs.cli import main; main()`, from its start to its end."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    forkedprogram.begin(["-c", *message["arguments"]], message["env"], message["cwd"])
    from stepfs.cli import main as stepfs  # noqa: PLC0415 - the tests' side of this module does not need it

    def program() -> None:
        forkeddaemon.change_constants()
        stepfs()

    return forkedprogram.run(program)


if __name__ == "__main__":
    main()
