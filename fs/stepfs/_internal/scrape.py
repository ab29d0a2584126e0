"""The scrape port: `/metrics` and `/healthz` over HTTP, on one address, and nothing else.

Of mounts and of planned runs. The address is 127.0.0.1 unless `--metrics-address` names another: the metrics name the
lake, the directory and the group, and a node that trains often has a public address.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import trio
from prometheus_client import make_wsgi_app

from stepfs.errors import RefusedError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client.registry import CollectorRegistry

LOOPBACK: Final = "127.0.0.1"
_TURN_S: Final = 5.0  # a loop that is stuck for so long answers no reader either
_CLIENT_S: Final = 10.0  # a silent client is dropped after this, with its thread

Healthy = Callable[[], bool]


@contextmanager
def served(
    port: int, registry: CollectorRegistry, *, address: str = LOOPBACK, healthy: Healthy = lambda: True
) -> Iterator[None]:
    """Inside the context `address` and `port` answer scrapes. A thread calls `healthy` for each request of `/healthz`.

    `RefusedError` if the port is taken, or the address is not one of this machine.
    """
    kind = _Server6 if ":" in address else _Server
    try:
        server = make_server(address, port, _application(registry, healthy), kind, _Request)
    except OSError as error:
        raise RefusedError(
            f"--metrics-port {port} on {address}: {error.strerror}; choose another port, or another --metrics-address"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="scrape", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def loop_turns() -> Healthy:
    """A test, for other threads, whether the event loop of the caller runs within 5 s."""
    token = trio.lowlevel.current_trio_token()

    def turns() -> bool:
        turned = threading.Event()
        try:
            token.run_sync_soon(turned.set)
        except trio.RunFinishedError:
            return False
        return turned.wait(_TURN_S)

    return turns


def _application(registry: CollectorRegistry, healthy: Healthy) -> WSGIApplication:
    metrics = make_wsgi_app(registry)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/metrics":
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        status, text = "404 Not Found", "ask for /metrics or /healthz\n"
        if path == "/healthz":
            status, text = ("200 OK", "ok\n") if healthy() else ("503 Service Unavailable", "stuck\n")
        body = text.encode()
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [body]

    return application


class _Request(WSGIRequestHandler):
    timeout = _CLIENT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the library's name)
        """Log nothing: a scrape is no event."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6
