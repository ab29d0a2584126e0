"""A server that answers each request with the bytes a test gives it, be they HTTP or not, and counts connections."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

BODY = bytes(range(256)) * (12 << 10)  # 3 MiB: several pieces
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Reply:
    """What the client gets; then the connection is kept, or ended, or nothing more comes for good."""

    sent: bytes
    end: bool = False
    hang: bool = False


def wanted(head: bytes) -> bytes:
    """The bytes of BODY in the range of a request."""
    found = _RANGE.search(head)
    return BODY[int(found[1]) : int(found[2]) + 1] if found else BODY


def part(head: bytes, *more: bytes, status: bytes = b"206 Partial Content", length: int | None = None) -> bytes:
    """The head of a good answer to a ranged GET, with `more` header lines."""
    found = _RANGE.search(head)
    assert found is not None
    size = len(wanted(head)) if length is None else length
    place = b"Content-Range: bytes %s-%s/%d" % (found[1], found[2], len(BODY))
    return b"\r\n".join(
        [b"HTTP/1.1 " + status, place, *([] if size < 0 else [b"Content-Length: %d" % size]), *more, b"\r\n"]
    )


def well(head: bytes) -> Reply:
    """The answer of a server that has BODY under every key."""
    return Reply(part(head) + wanted(head))


def said(status: bytes, body: bytes, *more: bytes) -> Reply:
    return Reply(b"\r\n".join([b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *more, b"\r\n"]) + body)


@dataclass
class RawServer:
    """`answer(head)` decides; change it at any time."""

    endpoint_url: str
    answer: Callable[[bytes], Reply] = well
    requests: list[bytes] = field(default_factory=list)  # their heads
    connections: int = 0
    tls: ssl.SSLContext | None = None
    _open: list[socket.socket] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                self.connections += 1
                threading.Thread(target=self._converse, args=[connection], daemon=True).start()

    def close(self) -> None:
        for connection in self._open:
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _converse(self, connection: socket.socket) -> None:
        asked = b""
        if self.tls is not None:
            with suppress(OSError):  # a client that distrusts the certificate
                connection = self.tls.wrap_socket(connection, server_side=True)
        self._open.append(connection)
        with connection, suppress(OSError):
            while True:
                while b"\r\n\r\n" not in asked:
                    more = connection.recv(1 << 16)
                    if not more:
                        return
                    asked += more
                head, _, asked = asked.partition(b"\r\n\r\n")
                self.requests.append(head)
                reply = self.answer(head)
                connection.sendall(reply.sent)
                if reply.end:
                    return
                if reply.hang:
                    while connection.recv(1 << 16):
                        pass


@contextmanager
def raw_server(host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[RawServer]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        name = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        server = RawServer(f"{scheme}://{name}:{listener.getsockname()[1]}", tls=tls)
        thread = threading.Thread(target=server.serve, args=[listener])
        thread.start()
        try:
            yield server
        finally:
            server.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
