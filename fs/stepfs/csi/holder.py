"""The process that starts the daemons of volumes, in a container of its own: a plugin that is restarted does not end them.

A plugin's request is one line of JSON on a unix socket, {"arguments": ["mount", …], "environment": {…}}; the answer is
{"code": …, "said": …} once the command has ended. Whoever may connect may mount: the socket's directory is root's. But the
environment is the Secret of a namespace, whose writers are no root of the node: it is data, by the names below.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import socketserver
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from stepfs.errors import UsageError

_REQUEST_BYTES_MAX: Final = 1 << 20
_COMMAND_S: Final = 110.0  # kubelet gives up after two minutes
_PROBE_S: Final = 1.0
_log = logging.getLogger("stepfs.csi.holder")

# What a secret may have: never the name of a file, a program, a profile or a token service.
_ALONE: Final = ("AWS_REGION", "AWS_DEFAULT_REGION", "STEPFS_SSE", "STEPFS_SSE_KMS_KEY_ID")
_OF_AWS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_KEYED: Final = (  # keys, and what may be beside them alone: the driver's own keys go to no server that a secret names
    (_OF_AWS, ("AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE")),
    (("GOOGLE_SERVICE_ACCOUNT_KEY",), ("GOOGLE_BASE_URL",)),
    (("AZURE_STORAGE_ACCOUNT_KEY",), ("AZURE_STORAGE_ENDPOINT",)),
    (("AZURE_STORAGE_SAS_TOKEN",), ("AZURE_STORAGE_ENDPOINT",)),
)
SECRET: Final = tuple(dict.fromkeys([*_ALONE, *(name for row in _KEYED for names in row for name in names)]))
_OF_ROLE: Final = re.compile(  # variables of the container that say who it is
    r"AWS_(ACCESS_KEY|CONFIG_FILE|CONTAINER|CREDENTIAL|(DEFAULT_)?PROFILE|ROLE|SECRET|SECURITY_TOKEN|SESSION_TOKEN"
    r"|SHARED_CREDENTIALS|WEB_IDENTITY)|BOTO_|CLOUDSDK_|GOOGLE_(?!BASE_URL)|AZURE_(?!(STORAGE_)?ENDPOINT)"
)
_CERTIFICATE: Final = "-----BEGIN CERTIFICATE-----"


def environment_of(secret: Mapping[str, str], directory: Path, own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a mount with this secret: `own`, without its role where the secret has keys. `UsageError`.

    A certificate goes into a file of `directory`.
    """
    if strange := sorted(secret.keys() - SECRET):
        raise UsageError(f"the secret has the keys {', '.join(strange)}; it may have {', '.join(SECRET)}, no others")
    given = {name: value.strip() for name, value in secret.items() if value.strip()}  # `echo KEY | base64` adds a break
    complete = [row for row in _KEYED if given.keys() >= set(row[0])]
    if lone := sorted(given.keys() - {*_ALONE, *(name for row in complete for names in row for name in names)}):
        needed = [" and ".join(keys) for keys, beside in _KEYED if lone[0] in {*keys, *beside}]
        raise UsageError(f"the secret has {lone[0]}, but not all of its keys; add {' or '.join(needed)}")
    if (url := given.pop("AWS_ENDPOINT_URL", None)) is not None:  # botocore would ask token services there, too
        given.setdefault("AWS_ENDPOINT_URL_S3", url)
    if (text := given.get("AWS_CA_BUNDLE")) is not None:
        if _CERTIFICATE not in text:
            raise UsageError(f"AWS_CA_BUNDLE in a secret is the certificate itself: a text with {_CERTIFICATE}")
        file = directory / "ca.pem"
        file.touch(mode=0o600)
        file.write_text(f"{text}\n")
        given["AWS_CA_BUNDLE"] = str(file)
    return {name: value for name, value in own.items() if not (complete and _OF_ROLE.match(name))} | given


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        line = self.rfile.readline(_REQUEST_BYTES_MAX)
        if not line:
            return  # whoever it was looked whether this process listens
        try:
            request = json.loads(line)
            answer = _run(request["arguments"], request["environment"])
        except (ValueError, LookupError, TypeError) as error:
            answer = {"code": 2, "said": f"not a request of at most {_REQUEST_BYTES_MAX} bytes: {type(error).__name__}"}
            _log.warning("%s", answer["said"])
        with suppress(OSError):  # the plugin was ended meanwhile; it asks again
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    allow_reuse_address = True


def _run(arguments: list[str], secret: dict[str, str]) -> dict[str, Any]:
    command, began = [sys.executable, "-m", "stepfs", *arguments], time.monotonic()
    _log.info("%s: begins", " ".join(arguments))
    try:
        done = subprocess.run(  # noqa: S603 - this program; the plugin names only its own commands
            command,
            env=environment_of(secret, Path(arguments[-1]).parent, os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        code, said = 6, f"{arguments[0]} did not end within {_COMMAND_S:g} s"
    except UsageError as error:
        code, said = error.exit_code, str(error)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.E2BIG:
            code, said = 2, f"an attribute, or a key of the secret, is too long or has a NUL ({error})"
        else:  # of the machine, now
            code, said = 6, f"cannot start stepfs {arguments[0]}: {error}"
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


def listens(path: Path) -> bool:
    """Whether a holder is there; the name of its socket outlives it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PROBE_S)
        return connection.connect_ex(str(path)) == 0


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
