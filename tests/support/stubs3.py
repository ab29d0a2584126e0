"""An S3 server of a few lines whose answers a test chooses: errors that no real server gives on demand."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from stepfs.store.api import Store


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def xml_error(status: int, code: str) -> Answer:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>because</Message></Error>"
    return Answer(status, text.encode(), {"Content-Type": "application/xml"})


HTML_404 = Answer(404, b"<html><body><h1>Not Found</h1><br></body></html>", {"Content-Type": "text/html"})
XHTML_404 = Answer(404, b"<html><body><h1>Not Found</h1></body></html>", {"Content-Type": "text/html"})
EMPTY_404 = Answer(404)
ABSENT = xml_error(404, "NoSuchKey")


class StubS3:
    """`answer(method, path)` decides; change it at any time."""

    def __init__(self, endpoint_url: str) -> None:
        self.endpoint_url = endpoint_url
        self.requests: list[tuple[str, str]] = []
        self.connections = 0
        self.authorizations: set[str | None] = set()  # headers of that name
        self.answer: Callable[[str, str], Answer] = lambda _method, _path: ABSENT


@contextmanager
def stub_s3() -> Iterator[StubS3]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            stub.connections += 1

        def _serve(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            stub.requests.append((self.command, self.path))
            stub.authorizations.add(self.headers.get("Authorization"))
            answer = stub.answer(self.command, self.path)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - http.server's names

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - http.server's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub = StubS3(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def calls(store: Store, where: str = "x/log/1") -> dict[str, Callable[[], Awaitable[object]]]:
    """One call of each verb."""
    prefix = where.rpartition("/")[0] + "/"
    return {
        "get": lambda: store.get(where), "read": lambda: store.read_into(where, 0, memoryview(bytearray(1))),
        "create": lambda: store.create(where, b"x"), "put": lambda: store.put(where, [b"x"]),
        "list": lambda: store.list(prefix), "delete": lambda: store.delete([where]),
    }  # fmt: skip
