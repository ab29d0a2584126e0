"""What the processes of one mount tell each other: a JSON object, and descriptors beside it, over a SEQPACKET socket.

Every first message of a side has `speaks`, the versions of these messages that it knows, and `version`, that of the package.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

SPEAKS = (1, 1)  # the least and the greatest version
HELD = (
    "spec",
    "state",
    "device",
    "lock",
    "listening",
    "abort",
    "asker",
    "daemon",
    "then",
)  # descriptors in a keeper's roll
BYTES_MAX = 1 << 16
_DESCRIPTORS_MAX = 64


class GarbageError(ValueError):
    """A message that no version of these programs sends. Close the connection."""


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(to: socket.socket, body: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
    """False if nobody is there any more, or nobody has listened for long. Never waits."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    try:
        to.sendmsg([json.dumps(body).encode()], rights, socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors, which the caller closes; an empty one if the other side has ended.

    Blocks; `TimeoutError` under a timeout of the socket. `GarbageError`.
    """
    numbers = array.array("i")
    room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * numbers.itemsize)
    try:
        data, beside, flags, _ = sock.recvmsg(BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return {}, []
    for _, _, content in beside:
        numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    if not data:
        close(numbers)
        return {}, []
    body = None
    if not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):  # else it is too long
        with suppress(ValueError, RecursionError):
            body = json.loads(data)
    if not isinstance(body, dict) or not body:
        close(numbers)
        raise GarbageError(f"{len(data)} bytes that are no message")
    return body, list(numbers)


def close(descriptors: Iterable[int]) -> None:
    """Those that are there (-1: none)."""
    for descriptor in descriptors:
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def agree(said: Mapping[str, Any]) -> bool:
    """Whether the other side knows a version of these messages that this one knows."""
    try:
        least, greatest = said["speaks"]
        return bool(least <= SPEAKS[1] and SPEAKS[0] <= greatest)
    except (LookupError, TypeError, ValueError):
        return False


def document(body: Mapping[str, Any]) -> int:
    """A descriptor of a file without a name that holds a longer text than a message may have."""
    descriptor = os.memfd_create("stepfs")
    data = json.dumps(body).encode()
    while data:
        data = data[os.write(descriptor, data) :]
    return descriptor


def read_document(descriptor: int) -> dict[str, Any]:
    """Its content, for any number of readers."""
    body: dict[str, Any] = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    return body
