"""What the processes of one mount tell each other: a JSON object, and descriptors beside it, over a SEQPACKET socket.

It imports the standard library alone, because the guardian speaks it, too.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_BYTES_MAX = 1 << 16
_DESCRIPTORS_MAX = 64


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(to: socket.socket, body: dict[str, Any], descriptors: Sequence[int] = ()) -> bool:
    """False if nobody is there any more."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    try:
        to.sendmsg([json.dumps(body).encode()], rights)
    except OSError:
        return False
    return True


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors, which the caller closes; an empty one if the other side has ended.

    Blocks; `TimeoutError` under a timeout of the socket.
    """
    numbers = array.array("i")
    room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * numbers.itemsize)
    try:
        data, beside, _, _ = sock.recvmsg(_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return {}, []
    for _, _, content in beside:
        numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    return (json.loads(data) if data else {}), list(numbers)


def document(body: dict[str, Any]) -> int:
    """A descriptor of a file without a name that holds a longer text than a message may have."""
    descriptor = os.memfd_create("stepfs")
    with os.fdopen(os.dup(descriptor), "w") as file:
        json.dump(body, file)
    return descriptor


def read_document(descriptor: int) -> dict[str, Any]:
    """Its content. Closes the descriptor."""
    with os.fdopen(descriptor) as file:
        file.seek(0)
        body: dict[str, Any] = json.load(file)
        return body
