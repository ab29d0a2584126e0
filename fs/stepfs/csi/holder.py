"""The process that starts the daemons of volumes, in a container of its own: a plugin that is restarted does not end them.

A plugin's request is one line of JSON on a unix socket, {"arguments": ["mount", …], "environment": {…}}; the answer is
{"code": …, "said": …} once the command has ended. Whoever may connect may mount: the socket's directory is root's.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_REQUEST_BYTES_MAX: Final = 1 << 20
_COMMAND_S: Final = 110.0  # kubelet gives up after two minutes
_log = logging.getLogger("stepfs.csi.holder")


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        try:
            request = json.loads(self.rfile.readline(_REQUEST_BYTES_MAX))
            answer = _run(request["arguments"], request["environment"])
        except (ValueError, LookupError, TypeError) as error:
            answer = {"code": 2, "said": f"not a request: {type(error).__name__}"}
            _log.warning("%s", answer["said"])
        with suppress(OSError):  # the plugin was ended meanwhile; it asks again
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    allow_reuse_address = True


def _run(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    command, began = [sys.executable, "-m", "stepfs", *arguments], time.monotonic()
    _log.info("%s: begins", " ".join(arguments))
    try:
        done = subprocess.run(  # noqa: S603 - this program; the plugin names only its own commands
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        code, said = 6, f"{arguments[0]} did not end within {_COMMAND_S:g} s"
    else:
        code, said = done.returncode, done.stderr.strip() or done.stdout.strip()
    how = "done" if code == 0 else f"exit code {code}"
    line = "; ".join([f"{' '.join(arguments)}: {how} after {time.monotonic() - began:.1f} s", *said.splitlines()])
    _log.log(logging.WARNING if code else logging.INFO, "%s", line)
    return {"code": code, "said": said}


def hold(path: Path) -> None:
    """Serve until a signal ends this process."""
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        server = _Server(str(path), _Handler)
    finally:
        os.umask(before)
    _log.info("starts the daemons of volumes, as %s asks", path)
    with server:
        server.serve_forever()


def ask(path: Path, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """(exit code, what it said) of a command of the holder. `OSError` if no holder answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_COMMAND_S + 5.0)
        connection.connect(str(path))
        connection.sendall(json.dumps({"arguments": arguments, "environment": environment}).encode() + b"\n")
        with connection.makefile("rb") as file:
            line = file.readline()
    if not line:
        raise ConnectionResetError("the holder ended before it answered")
    answer = json.loads(line)
    return int(answer["code"]), str(answer["said"])
