"""A directory for the front of PATH whose `stepfs`, `stepfs-produce` and `python -c` are forked from a loaded interpreter.

The pages that people follow start dozens of commands, and are about what these do, not about how Python starts: that
takes half a second each, and three where torch is imported. Every other use of `python` is a fresh interpreter. That
the installed commands start is what `test_cli_process` and `test_produce_text` see.

As a program, `loadedpath.py SOCKET MODULE…` is the server, and `loadedpath.py run SOCKET NAME WORD…` what stands on PATH.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOADED = (
    "stepfs.cli.app",
    "stepfs.mount.daemon",
    "stepfs.mount.unmount",
    "stepfs.store.local.local_store",
    "stepfs.store.s3.s3_store",
    "stepfs_producer.cli.app",
    "stepfs_producer.sync",
)
_MESSAGE_BYTES_MAX = 1 << 18
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def loaded_commands(directory: Path, *modules: str) -> Iterator[Path]:
    """The directory, made here; `modules` are loaded once a `python -c` names them. On leaving, its commands are killed."""
    directory.mkdir()
    address = directory / "socket"
    for name in ("stepfs", "stepfs-produce", "python"):
        fresh = f'[ "$1" = -c ] || exec "{sys.executable}" "$@"\n' if name == "python" else ""
        run = f'exec "{sys.executable}" -IS "{__file__}" run "{address}" {name} "$@"\n'
        (directory / name).write_text(f"#!/bin/sh\n{fresh}{run}")
        (directory / name).chmod(0o755)
    with subprocess.Popen(
        [sys.executable, __file__, str(address), *modules],
        stdin=subprocess.PIPE,  # its end ends the server
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the server of commands ended while it loaded"
        yield directory


def _run(address: str, words: list[str]) -> int:
    """In place of the command: hand it to the server, pass signals on, end as it does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES_MAX)
    for number in _FORWARDED:
        signal.signal(number, lambda caught, _: connection.send(bytes([caught])))
    env = [f"{name}={value}" for name, value in os.environ.items()]
    told = {"words": words, "cwd": [os.getcwd()], "env": env}
    socket.send_fds(connection, [repr(told).encode()], [0, 1, 2])
    code = int(connection.recv(16) or b"-9")
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _serve(address: str, modules: list[str]) -> None:
    import ast  # noqa: PLC0415 - what stands on PATH starts without these
    import gc  # noqa: PLC0415
    import importlib  # noqa: PLC0415
    import threading  # noqa: PLC0415

    import botodata  # noqa: PLC0415

    for module in _LOADED:
        importlib.import_module(module)
    botodata.preload()
    assert threading.active_count() == 1, "a fork would lack a thread"
    gc.freeze()  # a collection in a child would copy every page
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"ready\n")
    while listener.fileno() in select.select([listener.fileno(), 0], [], [])[0]:
        connection, _ = listener.accept()
        body, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES_MAX, 3)
        told = ast.literal_eval(body.decode())
        for module in modules:
            if module.partition(".")[0] in told["words"][-1]:  # else a page without torch would pay for it
                importlib.import_module(module)
        if os.fork() == 0:
            listener.close()
            os._exit(_look_after(connection, told, descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()
        with suppress(ChildProcessError):  # what they took is counted as this process's
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _look_after(connection: socket.socket, told: dict[str, list[str]], descriptors: list[int]) -> int:
    """Start the command, pass signals on to it, tell how it ended. Who asked, or the server, is gone: kill it."""
    pid = os.fork()
    if pid == 0:
        connection.close()
        os._exit(_command(told, descriptors))
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(pid)
    asker = connection.fileno()
    while ended not in (ready := select.select([ended, asker, 0], [], [])[0]):
        caught = b""
        with suppress(ConnectionError):
            caught = connection.recv(1) if asker in ready else b""
        os.kill(pid, caught[0] if caught else signal.SIGKILL)
        if not caught:
            break
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        connection.send(b"%d" % os.waitstatus_to_exitcode(status))
    return 0


def _command(told: dict[str, list[str]], descriptors: list[int]) -> int:
    """What an interpreter does with a console script, or with `-c TEXT`, from its start to its end."""
    import types  # noqa: PLC0415

    import forkedprogram  # noqa: PLC0415

    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    name, *words = told["words"]
    environment = dict(item.split("=", 1) for item in told["env"])
    arguments = ["-c", *words[2:]] if name == "python" else [name, *words]
    forkedprogram.begin(arguments, environment, told["cwd"][0])

    def program() -> None:
        if name == "python":
            sys.path[0] = ""
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(main))
        else:
            package = "stepfs" if name == "stepfs" else "stepfs_producer"
            __import__(f"{package}.cli", fromlist=["main"]).main()

    return forkedprogram.run(program)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(_run(sys.argv[2], sys.argv[3:]))
    _serve(sys.argv[1], sys.argv[2:])
