"""A double of Google's XML interface, as much of it as object_store uses: no finished emulator answers to that.

Creates are conditional by `x-goog-if-generation-match: 0`; with `--lie` it ignores the condition, as
gcp-storage-emulator does. Objects live in memory. A program: `python tests/support/googlexml.py PORT [--lie]`.
"""

from __future__ import annotations

import re
import sys
import threading
from bisect import bisect_left, bisect_right, insort
from datetime import UTC, datetime
from email.utils import format_datetime
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "stepfs-tests"
_PAGE = 1000


class Double(BaseHTTPRequestHandler):
    """One connection. The stored objects belong to the class, under one lock."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    lies = False
    lock = threading.Lock()
    objects: dict[str, tuple[bytes, datetime]] = {}  # noqa: RUF012 - one bucket a process
    names: list[str] = []  # noqa: RUF012 - sorted
    pieces: dict[str, dict[int, bytes]] = {}  # noqa: RUF012 - of multipart uploads

    def _serve(self) -> None:
        url = urlsplit(self.path)
        bucket, _, name = unquote(url.path).lstrip("/").partition("/")
        asked = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if bucket != BUCKET:
            self._refuse(404 if bucket else 400, "NoSuchBucket" if bucket else "InvalidURI")
            return
        with self.lock:
            {"GET": self._get, "PUT": self._put, "POST": self._post, "DELETE": self._delete}[self.command](
                name, asked, body
            )

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - http.server's names

    def _get(self, name: str, asked: dict[str, str], _body: bytes) -> None:
        if not name:
            self._list(asked.get("prefix", ""), asked.get("continuation-token") or asked.get("start-after", ""))
        elif name not in self.objects:
            self._refuse(404, "NoSuchKey")
        else:
            body, when = self.objects[name]
            headers = {"Last-Modified": format_datetime(when, usegmt=True), "ETag": _etag(body)}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted is None:
                self._answer(200, body, headers)
            elif int(wanted[1]) >= len(body):
                self._refuse(416, "InvalidRange")
            else:
                part = body[int(wanted[1]) : int(wanted[2]) + 1]
                place = f"bytes {wanted[1]}-{int(wanted[1]) + len(part) - 1}/{len(body)}"
                self._answer(206, part, {**headers, "Content-Range": place})

    def _list(self, prefix: str, after: str) -> None:
        begin = max(bisect_left(self.names, prefix), bisect_right(self.names, after))
        found = [name for name in self.names[begin : begin + _PAGE + 1] if name.startswith(prefix)]
        rows = "".join(
            f"<Contents><Key>{name}</Key><LastModified>{when.isoformat()}</LastModified><ETag>{_etag(body)}</ETag>"
            f"<Size>{len(body)}</Size></Contents>"
            for name, (body, when) in ((name, self.objects[name]) for name in found[:_PAGE])
        )
        more = f"<NextContinuationToken>{found[_PAGE - 1]}</NextContinuationToken>" if found[_PAGE:] else ""
        self._answer(200, f"<ListBucketResult>{rows}{more}</ListBucketResult>".encode())

    def _put(self, name: str, asked: dict[str, str], body: bytes) -> None:
        if "uploadId" in asked:
            self.pieces[asked["uploadId"]][int(asked["partNumber"])] = body
        elif name in self.objects and self.headers.get("x-goog-if-generation-match") == "0" and not self.lies:
            self._refuse(412, "PreconditionFailed")
            return
        else:
            self._keep(name, body)
        self._answer(200, b"", {"ETag": '"x"', "x-goog-generation": "1"})

    def _post(self, name: str, asked: dict[str, str], _body: bytes) -> None:
        if "uploads" in asked:
            self.pieces[name] = {}
            said = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        else:
            self._keep(name, b"".join(piece for _, piece in sorted(self.pieces.pop(asked["uploadId"]).items())))
            said = "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
        self._answer(200, said.encode())

    def _delete(self, name: str, asked: dict[str, str], _body: bytes) -> None:
        if "uploadId" in asked:
            self.pieces.pop(asked["uploadId"], None)
        elif self.objects.pop(name, None) is None:
            self._refuse(404, "NoSuchKey")
            return
        else:
            del self.names[bisect_left(self.names, name)]
        self._answer(204)

    def _keep(self, name: str, body: bytes) -> None:
        if name not in self.objects:
            insort(self.names, name)
        self.objects[name] = body, datetime.now(UTC)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - http.server's name
        pass


def _etag(body: bytes) -> str:
    return f'"{md5(body, usedforsecurity=False).hexdigest()}"'


if __name__ == "__main__":
    Double.lies = "--lie" in sys.argv
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Double).serve_forever()
