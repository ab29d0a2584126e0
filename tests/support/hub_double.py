"""A double of the Hub's API for data sets, and of its CDN on another port; `commits` are revisions with their files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

REPOSITORY = "owner/name"
TOKEN = "hf_" + "s3cret" * 4
_PAGE = 3
_API = f"/api/datasets/{REPOSITORY}/"


@dataclass
class Request:
    """One request to either server."""

    server: str  # hub, cdn
    path: str
    authorization: str | None
    range: str | None


@dataclass
class Hub:
    """What it has, and what was asked."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    small: set[str] = field(default_factory=set)  # files that are no LFS: answered by the Hub itself
    private: bool = False
    busy: list[dict[str, str]] = field(default_factory=list)  # headers of answers 429 that come first
    expired: int = 0  # so many signed places hold no more
    other_etag: bool = False
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    cdn_url: str = ""
    signed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def push(self, branch: str, files: dict[str, bytes]) -> str:
        """The commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit], self.branches[branch] = files, commit
        return commit

    def etag(self, path: str, data: bytes) -> str:
        if path in self.small:
            return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return hashlib.sha256(data).hexdigest()

    def row(self, path: str, data: bytes) -> dict[str, object]:
        found: dict[str, object] = {
            "type": "file",
            "path": path,
            "size": len(data),
            "oid": hashlib.sha1(data).hexdigest(),
        }
        if path in self.small:
            return {**found, "oid": self.etag(path, data)}
        return {**found, "lfs": {"oid": self.etag(path, data), "size": len(data), "pointerSize": 131}}

    def asked(self, server: str, what: str = "") -> list[Request]:
        return [one for one in self.requests if one.server == server and what in one.path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    server_name: str

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        with hub.lock:
            said = self.headers.get("Authorization")
            hub.requests.append(Request(self.server_name, self.path, said, self.headers.get("Range")))
            if self.server_name == "cdn":
                self._bytes(unquote(url.path)[1:], url.query)
            elif hub.busy:
                self._answer(429, b"slow down", hub.busy.pop(0))
            elif hub.private and said != f"Bearer {TOKEN}":
                self._answer(401, b'{"error": "Repository Not Found"}', {"X-Error-Code": "RepoNotFound"})
            else:
                self._hub(url.path, url.query)

    def _hub(self, path: str, query: str) -> None:
        hub = self.hub
        if path.startswith(_API + "revision/"):
            commit = self._commit(path.removeprefix(_API + "revision/"))
            body = {"id": REPOSITORY, "sha": commit}
            self._answer(200, json.dumps(body).encode()) if commit else self._answer(404, b"{}")
        elif path.startswith(_API + "tree/"):
            self._tree(path.removeprefix(_API + "tree/"), query)
        elif found := re.fullmatch(f"/datasets/{REPOSITORY}/resolve/([^/]+)/(.+)", path):
            commit, key = self._commit(found[1]), unquote(found[2])
            data = hub.commits[commit].get(key) if commit else None
            if data is None:
                return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            etag = "0" * 64 if hub.other_etag else hub.etag(key, data)
            more = {"X-Repo-Commit": commit or "", "Accept-Ranges": "bytes"}
            if key in hub.small:
                return self._ranged(data, {**more, "ETag": f'"{etag}"'})
            hub.signed += 1
            place = f"{hub.cdn_url}/{commit}/{quote(key)}?Signature={hub.signed}"
            self._answer(
                302, b"", {**more, "Location": place, "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
            )
        else:
            self._answer(404, b"{}")
        return None

    def _commit(self, quoted: str) -> str | None:
        revision = unquote(quoted)
        return revision if revision in self.hub.commits else self.hub.branches.get(revision)

    def _tree(self, rest: str, query: str) -> None:
        revision, _, quoted = rest.partition("/")
        commit, below = self._commit(revision), unquote(quoted)
        files = self.hub.commits[commit] if commit else {}
        rows = [
            self.hub.row(path, data) for path, data in files.items() if path.startswith(f"{below}/" if below else "")
        ]
        if not rows:
            return self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        rows.insert(0, {"type": "directory", "oid": "0", "size": 0, "path": f"{below}/d".strip("/")})
        cursor = re.search(r"cursor=(\d+)", query)
        first = int(cursor[1]) if cursor else 0
        onward = f"{self.hub.url}{_API}tree/{rest}?recursive=true&cursor={first + _PAGE}"
        more = {"Link": f'<{onward}>; rel="next"'} if first + _PAGE < len(rows) else {}
        return self._answer(200, json.dumps(rows[first : first + _PAGE]).encode(), more)

    def _bytes(self, path: str, query: str) -> None:
        commit, _, key = path.partition("/")
        if int(query.removeprefix("Signature=")) <= self.hub.expired:
            return self._answer(403, b"<Error>Request has expired</Error>")
        return self._ranged(self.hub.commits[commit][key], {"ETag": '"of-the-cdn"'})

    def _ranged(self, data: bytes, more: dict[str, str]) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if found is None:
            return self._answer(200, data, more)
        begin, end = int(found[1]), int(found[2]) + 1
        if begin >= len(data):
            return self._answer(416, b"")
        more["Content-Range"] = f"bytes {begin}-{min(end, len(data)) - 1}/{len(data)}"
        return self._answer(206, data[begin:end], more)

    def _answer(self, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(more or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub_double() -> Iterator[Hub]:
    """Both servers, on loopback."""
    hub, servers = Hub(), []
    try:
        for name in ("hub", "cdn"):
            handler = type("Handler", (_Handler,), {"hub": hub, "server_name": name})
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            server.daemon_threads = True
            servers.append(server)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        hub.url, hub.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
