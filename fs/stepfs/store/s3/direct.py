"""Ranged GETs over sockets of the store's own, straight into the caller's buffer.

botocore stays the truth: its last GET shows address, path and region, its credentials sign, and all but a plain 206 with the
whole range is asked again through it.
"""

import hashlib
import hmac
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from ssl import SSLContext
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, quote, urlsplit

from botocore.compat import ensure_bytes
from botocore.exceptions import BotoCoreError
from botocore.utils import get_environ_proxies
from urllib3.util import wait_for_read

from stepfs._internal import entropy
from stepfs.store.server_answers import ReadTarget, is_throttled

CONNECT_S: Final = 5.0
IDLE_S: Final = 10.0  # a middlebox may drop an idle connection silently
_HEAD_BYTES_MAX: Final = 16 << 10
_DOUBTS_MAX: Final = 8
_NO_BODY: Final = hashlib.sha256(b"").hexdigest()
_TOKEN: Final = "x-amz-security-token"  # noqa: S105 (the name of a header)
_KNOWN_SIGNATURE: Final = re.compile(
    r"AWS4-HMAC-SHA256 Credential=[^/ ]+/\d{8}/([^/ ]+)/s3/aws4_request, "
    rf"SignedHeaders=host;range;x-amz-content-sha256;x-amz-date(?:;{_TOKEN})?, Signature=[0-9a-f]+"
)
_BUSY: Final = re.compile(rb"http/1\.1 (429|5\d\d) ")
_CLOSING: Final = re.compile(rb"\r\nconnection:(?! *keep-alive\r)")


class _Place(NamedTuple):
    """The bucket's URL, the region and the agent with which botocore sent its last GET."""

    bucket: SplitResult
    region: str
    agent: str


class _UnusualError(Exception):
    """The answer is botocore's business."""


@dataclass
class DirectReads:
    """Thread-safe; as many connections as there are reads at a time. `on_request`, `on_throttled` as of `Clients`."""

    credentials: Any  # botocore's, which renew themselves
    tls: Callable[[], SSLContext]
    timeout_s: float
    on_request: Callable[[str, Mapping[str, Any]], None]
    on_throttled: Callable[[], None]
    sent: threading.local = field(default_factory=threading.local)  # its `request` is botocore's
    _place: _Place | None = None
    _doubts: int = 0  # unusual answers in a row, where botocore got a plain one
    _idle: list[tuple[str, socket.socket, float]] = field(default_factory=list)

    def download(self, key: str, offset: int, target: ReadTarget, botocore: Callable[[], None]) -> None:
        """Fill the rest of `target`. Raises what `botocore` raises, and `OSError` if an answer broke off."""
        path, doubtful, place = quote(key, safe="/~"), False, self._place
        if place is not None and not target.answers:
            try:
                self._read(place, path, offset, target)
            except _UnusualError:
                doubtful = True
            except (BotoCoreError, OSError):  # also no connection, no credentials: botocore says why
                if target.answers:
                    raise
            else:
                return
        self._place = None
        target.check()
        botocore()
        self._doubts += doubtful
        if self._doubts < _DOUBTS_MAX:
            self._place = self._learn(path)

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    def _learn(self, path: str) -> _Place | None:
        url, headers = urlsplit(self.sent.request.url), self.sent.request.headers
        found = (ensure_bytes(headers.get(name, "")).decode() for name in ("Authorization", "User-Agent"))
        authorization, agent = found
        signed = _KNOWN_SIGNATURE.fullmatch(authorization)
        known = not url.query and url.path.endswith(f"/{path}") and not get_environ_proxies(url.geturl())
        netloc = url.netloc.lower().removesuffix(":443" if url.scheme == "https" else ":80")
        bucket = url._replace(netloc=netloc, path=url.path.removesuffix(path))
        return _Place(bucket, signed[1], agent) if signed and known else None

    def _read(self, place: _Place, path: str, offset: int, target: ReadTarget) -> None:
        first, size = offset + target.done, target.remaining
        request = self._request(place, path, f"bytes={first}-{first + size - 1}")
        connection = self._connection(place.bucket)
        keep = False
        try:
            # The shutdown of the socket itself, also below TLS, whose own would go on in plain text.
            with target.connected(partial(socket.socket.shutdown, connection, socket.SHUT_RDWR)):
                self.on_request("GetObject", {})
                connection.sendall(request)
                head, rest = _answer(connection)
                self._check(head, first, size, len(rest))
                target.answers += 1
                if rest:
                    target.append(rest)
                flags = 0 if connection.gettimeout() else socket.MSG_WAITALL
                while target.remaining:
                    target.receive(lambda room: connection.recv_into(room, 0, flags))
            keep, self._doubts = _CLOSING.search(head) is None, 0
        finally:
            if keep:
                self._idle.append((place.bucket.netloc, connection, time.monotonic()))
            else:
                connection.close()

    def _check(self, head: bytes, first: int, size: int, got: int) -> None:
        if busy := _BUSY.match(head):
            if is_throttled(int(busy[1]), ""):
                self.on_throttled()
            time.sleep(entropy.uniform(0.0, 1.0))  # as botocore before its first retry
            raise ConnectionError
        whole = b"content-range: bytes %d-%d/" % (first, first + size - 1), b"content-length: %d\r\n" % size
        plain = head.startswith(b"http/1.1 206 ") and all(b"\r\n" + line in head for line in whole)
        if not plain or got > size or head.count(b"\r\ncontent-length:") > 1 or b"-encoding:" in head:
            raise _UnusualError

    def _connection(self, url: SplitResult) -> socket.socket:
        with suppress(IndexError):
            while True:
                netloc, connection, since_s = self._idle.pop()
                fresh = netloc == url.netloc and time.monotonic() - since_s < IDLE_S
                if fresh and not wait_for_read(connection, 0):  # neither ended nor out of step
                    return connection
                connection.close()
        tls = url.scheme == "https"
        connection = socket.create_connection((url.hostname, url.port or (443 if tls else 80)), CONNECT_S)
        if tls:
            connection = self.tls().wrap_socket(connection, server_hostname=url.hostname)
            connection.settimeout(self.timeout_s)
        else:  # with the kernel's own time-out one call fills a whole piece
            connection.settimeout(None)
            time_out = struct.pack("ll", int(self.timeout_s), int(self.timeout_s % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time_out)
        return connection

    def _request(self, place: _Place, path: str, range_: str) -> bytes:
        found = self.credentials.get_frozen_credentials()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        scope = f"{stamp[:8]}/{place.region}/s3/aws4_request"
        names = f"host;range;x-amz-content-sha256;x-amz-date{f';{_TOKEN}' if found.token else ''}"
        values = [place.bucket.netloc, range_, _NO_BODY, stamp, found.token]
        lines = "".join(f"{name}:{value}\n" for name, value in zip(names.split(";"), values, strict=False))
        asked = f"GET\n{place.bucket.path}{path}\n\n{lines}\n{names}\n{_NO_BODY}"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(asked.encode()).hexdigest()}".encode()
        signature = hmac.digest(_signing_key(found.secret_key, stamp[:8], place.region), text, "sha256").hex()
        lines += f"accept-encoding:identity\nuser-agent:{place.agent}\nauthorization:AWS4-HMAC-SHA256 "
        lines += f"Credential={found.access_key}/{scope}, SignedHeaders={names}, Signature={signature}\n\n"
        return f"GET {place.bucket.path}{path} HTTP/1.1\n{lines}".replace("\n", "\r\n").encode()


@lru_cache(maxsize=4)
def _signing_key(secret: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _answer(connection: socket.socket) -> tuple[bytes, bytes]:
    """The head of the answer, in lower case, and the first bytes of the body."""
    buffer, got, end = bytearray(_HEAD_BYTES_MAX), 0, -1
    while end < 0:
        count = connection.recv_into(memoryview(buffer)[got:])
        if not count:
            raise ConnectionResetError if got < len(buffer) else _UnusualError
        got += count
        end = buffer.find(b"\r\n\r\n", 0, got)
    return bytes(buffer[: end + 2]).lower(), bytes(buffer[end + 4 : got])
