"""A proxy in front of a real S3 server that loses, delays, damages and refuses requests on demand.

Bytes pass unchanged, the Host header too: clients sign for the proxy's address, which the server accepts. Also a
program for torture runs:
`python tests/support/faultproxy.py UPSTREAM_PORT --seed 7 --probability 'lost response=0.01'`.
"""

from __future__ import annotations

import argparse
import random
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio
from certificates import Certificate
from httpframes import CHUNK, Message, Reader
from trio.abc import Stream

_HANG_S = 600.0


@dataclass(frozen=True)
class Trouble:
    """The fate of one request: applied or not on the server, and the client's substitute for its answer."""

    name: str
    forwarded: bool = True  # the server gets the request
    late_s: float | None = None  # the server gets it this long after the client was let go
    delay_s: float = 0.0  # before anything happens
    status: int | None = None  # the client gets this status
    reset: bool = False  # the client's connection is reset
    hang: bool = False  # the client hears nothing until it gives up
    keep_share: float | None = None  # the client gets this share of the body, then the end of the connection
    bytes_per_s: float | None = None  # the client gets the body this slowly


LOST_REQUEST = Trouble("lost request", forwarded=False, hang=True)
LOST_RESPONSE = Trouble("lost response", hang=True)
RESET_BEFORE = Trouble("reset before", forwarded=False, reset=True)
RESET_AFTER = Trouble("reset after", reset=True)
CONFLICT_409 = Trouble("409", forwarded=False, status=409)
FALSE_412 = Trouble("412", forwarded=False, status=412)
SKEWED_403 = Trouble("403", forwarded=False, status=403)
TOO_MANY_429 = Trouble("429", forwarded=False, status=429)
ERROR_500 = Trouble("500", forwarded=False, status=500)
ERROR_500_APPLIED = Trouble("500 after apply", status=500)
SLOW_DOWN_503 = Trouble("503", forwarded=False, status=503)
SHORT_BODY = Trouble("short body", keep_share=0.5)
KNOWN = [
    LOST_REQUEST, LOST_RESPONSE, RESET_BEFORE, RESET_AFTER, CONFLICT_409, ERROR_500, ERROR_500_APPLIED, SLOW_DOWN_503,
    SHORT_BODY,
]  # fmt: skip
_CODES = {
    403: "RequestTimeTooSkewed", 409: "ConditionalRequestConflict", 412: "PreconditionFailed", 429: "TooManyRequests",
    500: "InternalError", 503: "SlowDown",
}  # fmt: skip


def delayed(late_s: float) -> Trouble:
    """Reset now, applied later."""
    return Trouble(f"applied {late_s:g} s late", forwarded=False, late_s=late_s, reset=True)


def slowly(bytes_per_s: float) -> Trouble:
    return Trouble(f"{bytes_per_s:g} bytes/s", bytes_per_s=bytes_per_s)


@dataclass(frozen=True)
class Handled:
    """One request that came by."""

    method: str
    path: str
    trouble: str  # '' for none


class FaultProxy:
    """`await nursery.start(proxy.serve)`, then use `endpoint_url`. Single-threaded: change its plan at any time."""

    def __init__(self, upstream_port: int, *, seed: int = 0, certificate: Certificate | None = None) -> None:
        """`certificate`: speak TLS to clients."""
        self.handled: list[Handled] = []
        self.port = 0
        self._upstream_port = upstream_port
        self._script: list[tuple[str, str, Trouble]] = []
        self._probabilities: dict[Trouble, float] = {}
        self._rng = random.Random(seed)
        self._tls = certificate and certificate.of_server()
        self._open = trio.Event()
        self._open.set()
        self._late: trio.Nursery | None = None

    @property
    def endpoint_url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def once(self, method: str, part: str, trouble: Trouble) -> None:
        """The next request of `method` ('*' for any) whose path contains `part` gets into `trouble`."""
        self._script.append((method, part, trouble))

    def randomly(self, probabilities: Mapping[Trouble, float]) -> None:
        """From now on each request gets into each trouble with its probability."""
        self._probabilities = dict(probabilities)

    def hold(self) -> None:
        """The server hangs: requests wait until `release`."""
        self._open = trio.Event()

    def release(self) -> None:
        self._open.set()

    async def serve(self, *, port: int = 0, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
        self.port = int(listeners[0].socket.getsockname()[1])
        async with trio.open_nursery() as nursery:
            self._late = nursery
            await nursery.start(partial(trio.serve_listeners, self._client, listeners))
            task_status.started()

    async def _client(self, client: trio.SocketStream) -> None:
        stream: Stream = client
        if self._tls:
            stream = trio.SSLStream(client, self._tls, server_side=True, https_compatible=True)
        upstream: trio.SocketStream | None = None
        incoming = Reader(stream)
        try:
            while (request := await incoming.message()) is not None:
                if upstream is None:
                    upstream = await trio.open_tcp_stream("127.0.0.1", self._upstream_port)
                    outgoing = Reader(upstream)
                trouble = self._pick(request)
                self.handled.append(
                    Handled(request.first_line[0], request.first_line[1], trouble.name if trouble else "")
                )
                await self._open.wait()
                if not await self._exchange(stream, incoming, upstream, outgoing, request, trouble):
                    if trouble is not None and trouble.reset:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            return  # one side went away: so does the other
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.aclose()
                if upstream is not None:
                    await upstream.aclose()

    def _pick(self, request: Message) -> Trouble | None:
        method, path = request.first_line[:2]
        for position, (wanted, part, trouble) in enumerate(self._script):
            if wanted in {"*", method} and part in path:
                del self._script[position]
                return trouble
        healthy = 1.0 - sum(self._probabilities.values())
        choice: Trouble | None
        (choice,) = self._rng.choices([None, *self._probabilities], [healthy, *self._probabilities.values()])
        return choice

    async def _exchange(
        self,
        client: Stream,
        incoming: Reader,
        upstream: trio.SocketStream,
        outgoing: Reader,
        request: Message,
        trouble: Trouble | None,
    ) -> bool:
        """One request and its answer; False when the connection is over."""
        trouble = trouble or Trouble("")
        await trio.sleep(trouble.delay_s)
        if request.headers.get("expect", "").lower() == "100-continue":
            await client.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
        size = int(request.headers.get("content-length", "0"))
        assert "transfer-encoding" not in request.headers, "S3 clients send a length"
        if trouble.forwarded:
            await upstream.send_all(request.head)
            await incoming.relay(size, upstream)
            answer = await outgoing.message()
            while answer is not None and answer.first_line[1] == "100":
                answer = await outgoing.message()
            if answer is None:
                return False
        else:
            body = bytearray()
            await incoming.relay(size, body)
            answer = None
            if trouble.late_s is not None:
                assert self._late is not None
                self._late.start_soon(self._apply_late, request.head + bytes(body), trouble.late_s)
        if trouble.hang or trouble.reset or trouble.status:
            if answer is not None:  # the server must have finished before the client learns anything
                await outgoing.relay_body(request, answer, bytearray())
            return await _instead(client, trouble)
        assert answer is not None
        if trouble.keep_share is not None:
            body = bytearray()
            await outgoing.relay_body(request, answer, body)
            await client.send_all(answer.head + body[: int(len(body) * trouble.keep_share)])
            return False
        await client.send_all(answer.head)
        await outgoing.relay_body(request, answer, client, bytes_per_s=trouble.bytes_per_s)
        return "close" not in (
            request.headers.get("connection", "").lower(),
            answer.headers.get("connection", "").lower(),
        )

    async def _apply_late(self, message: bytes, late_s: float) -> None:
        await trio.sleep(late_s)
        with suppress(OSError, trio.BrokenResourceError):  # too late: the server was killed meanwhile
            async with await trio.open_tcp_stream("127.0.0.1", self._upstream_port) as upstream:
                await upstream.send_all(message)
                await Reader(upstream).message()


async def _instead(client: Stream, trouble: Trouble) -> bool:
    if trouble.hang:
        with trio.move_on_after(_HANG_S):
            while await client.receive_some(CHUNK):
                pass
        return False
    if trouble.reset:
        return False
    assert trouble.status is not None
    code = _CODES[trouble.status]
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>planted</Message></Error>".encode()
    head = f"HTTP/1.1 {trouble.status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    await client.send_all(head.encode() + body)
    return True


async def main() -> None:
    """Serve until killed; prints the endpoint URL first."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("upstream_port", type=int)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--probability", action="append", default=[], metavar="NAME=P")
    options = parser.parse_args()
    proxy = FaultProxy(options.upstream_port, seed=options.seed)
    known = {trouble.name: trouble for trouble in KNOWN}
    pairs = [pair.rpartition("=") for pair in options.probability]
    proxy.randomly({known[name]: float(value) for name, _, value in pairs})
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(proxy.serve, port=options.port))
        print(proxy.endpoint_url, flush=True)  # noqa: T201 - whoever started this reads it


if __name__ == "__main__":
    trio.run(main)
