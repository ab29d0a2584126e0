"""Data sets of the Hub (`hf://datasets/OWNER/NAME@REVISION/…`): listed by commit, read in ranges by worker processes.

A plan that is read names the commit of a revision, so its kept text does, and whoever makes steps again reads the same
bytes. Rejected: `huggingface_hub`, which brings an HTTP client and a transfer engine of its own for three kinds of request.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

import urllib3

from stepfs.errors import AbsentError, RefusedError, StoreUnreachableError, UsageError
from stepfs.store.listed import ADVICE, ListedObject, gone, replaced, shorter

if TYPE_CHECKING:
    from stepfs_producer.plan.model import Plan

SCHEME: Final = "hf://"
_ENDPOINT: Final = "https://huggingface.co"
_URL: Final = re.compile(r"hf://datasets/([\w.-]+)/([\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/@]+))?(?:/(.*))?")
_NEXT: Final = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_TOKEN: Final = re.compile(r"hf_\w{8,}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S: Final = 20.0  # without a byte
_HOPS_MAX: Final = 5  # redirects
_WAIT_MAX_S: Final = 900.0  # in all, where the server asks for patience
_WAIT_S: Final = 5.0  # where it does not say for how long
_PLACE_KEPT_S: Final = 300.0  # signed places hold for an hour
_PLACES_MAX: Final = 1024
_ANSWER_BYTES_MAX: Final = 64 << 20
_MOVED: Final = frozenset((301, 302, 303, 307, 308))
_DENIED: Final = frozenset((HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN))


class HubUrl(NamedTuple):
    """A data set at a revision, and what is named in it."""

    repository: str  # OWNER/NAME
    revision: str
    key: str

    @property
    def root(self) -> str:
        return f"{SCHEME}datasets/{self.repository}@{quote(self.revision, safe='')}"


class _Answer(NamedTuple):
    status: int
    headers: Any  # by name, in any case
    data: bytes


def parse_hub_url(url: str) -> HubUrl:
    """`UsageError` unless it names a data set."""
    found = _URL.fullmatch(url)
    if found is None:
        shown = _TOKEN.sub("hf_…", url)
        raise UsageError(
            f"{shown!r} names no data set of the Hub; write {SCHEME}datasets/OWNER/NAME@REVISION/data/*.jsonl"
        )
    owner, name, revision, key = found.groups()
    return HubUrl(f"{owner}/{name}", unquote(revision or "main"), key or "")


def with_commits(plan: Plan) -> Plan:
    """The plan with the commits in place of the revisions that its sources name. Errors as of `HubDataset.list`."""
    known: dict[str, str] = {}

    def named(file: str) -> str:
        if not file.startswith(SCHEME):
            return file
        url = parse_hub_url(file)
        if url.root not in known:
            known[url.root] = HubDataset(url.root).commit()
        return f"{url._replace(revision=known[url.root]).root}/{url.key}"

    sources = {name: one.changed(files=tuple(map(named, one.files))) for name, one in plan.sources.items()}
    return plan.changed(sources=sources) if known else plan


def advice_on(then: Plan | None, name: str) -> str:
    """What to do where files of a source are not those of the plan of then."""
    files = then.sources[name].files if then is not None and name in then.sources else ()
    there = next((file for file in files if file.startswith(SCHEME)), None)
    return ADVICE if there is None else ADVICE.replace("restore it", f"name the commit of then in the plan, {there}")


class HubDataset:
    """A `stepfs.store.listed.Bucket`: a data set at a revision. HF_TOKEN goes to HF_ENDPOINT alone."""

    def __init__(self, root: str) -> None:
        self._url = parse_hub_url(root)
        self._endpoint = (os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
        self._token = os.environ.get("HF_TOKEN", "").strip()
        self._pool = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(_TIMEOUT_S), maxsize=8)
        self._lock = threading.Lock()
        self._listed: dict[str, list[ListedObject]] = {}  # by directory; a commit does not change
        self._places: dict[str, tuple[str, float]] = {}  # by key: where the bytes are, and until when

    def commit(self) -> str:
        """Of the revision."""
        if _COMMIT.fullmatch(self._url.revision):
            return self._url.revision
        found = self._document(f"revision/{quote(self._url.revision, safe='')}")[0]
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise RefusedError(
                f"{self._url.root}: {self._endpoint} names no commit; name another server by HF_ENDPOINT"
            )
        return commit

    def list(self, prefix: str) -> Iterator[ListedObject]:
        """`AbsentError`: no such data set or revision; `RefusedError`: its reader has to be somebody else."""
        directory = prefix[: prefix.rfind("/") + 1]
        with self._lock:
            if directory not in self._listed:
                self._listed[directory] = sorted(self._tree(directory.rstrip("/")))
        yield from (found for found in self._listed[directory] if found.key.startswith(prefix))

    def read(self, key: str, begin: int, end: int, etag: str) -> bytes:
        headers = {"Range": f"bytes={begin}-{end - 1}"}
        place, until = self._places.get(key, ("", 0.0))
        answer = self._get(place, headers, end - begin) if time.monotonic() < until else None
        if answer is None or answer.status in _DENIED:  # the place is not known, or not signed any more
            answer = self._resolved(key, headers, end - begin, etag)
        if answer.status == HTTPStatus.NOT_FOUND:
            raise gone(f"{self._url.root}/{key}")
        if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise shorter(f"{self._url.root}/{key}")
        self._check(answer, f"read {key}")
        ranged = answer.headers.get("Content-Range", "").startswith(f"bytes {begin}-")
        if not ranged and (begin or answer.status == HTTPStatus.PARTIAL_CONTENT):
            raise RefusedError(
                f"{self._url.root}/{key}: the server ignores Range requests; name another by HF_ENDPOINT"
            )
        if len(answer.data) < end - begin:
            raise shorter(f"{self._url.root}/{key}")
        return answer.data

    def _resolved(self, key: str, headers: dict[str, str], bytes_max: int, etag: str) -> _Answer:
        """The range, by way of the Hub, which says whether the file is the listed one and where its bytes lie."""
        revision = quote(self._url.revision, safe="")
        place = f"{self._endpoint}/datasets/{self._url.repository}/resolve/{revision}/{quote(key)}"
        for _ in range(_HOPS_MAX):
            answer = self._get(place, headers, bytes_max)
            moved = answer.status in _MOVED
            said = answer.headers.get("X-Linked-Etag") or ("" if moved else answer.headers.get("ETag", ""))
            good = answer.status < HTTPStatus.BAD_REQUEST and self._is_hub(place)
            if good and said and said.removeprefix("W/").strip('"') != etag:
                raise replaced(f"{self._url.root}/{key}")
            if not moved:
                if not self._is_hub(place):
                    if len(self._places) >= _PLACES_MAX:
                        self._places.clear()
                    self._places[key] = place, time.monotonic() + _PLACE_KEPT_S
                return answer
            place = urljoin(place, answer.headers.get("Location", ""))
        raise RefusedError(
            f"{self._url.root}/{key}: more than {_HOPS_MAX} redirects; name another server by HF_ENDPOINT"
        )

    def _tree(self, directory: str) -> Iterator[ListedObject]:
        below = f"/{quote(directory)}" if directory else ""
        path: str | None = f"tree/{quote(self._url.revision, safe='')}{below}?recursive=true"
        while path is not None:
            rows, path = self._document(path)
            for row in rows if isinstance(rows, list) else ():
                if row.get("type") == "file":
                    etag = (row.get("lfs") or {}).get("oid") or row.get("oid", "")
                    yield ListedObject(row["path"], int(row["size"]), etag)

    def _document(self, path: str) -> tuple[Any, str | None]:
        """What the API says there, and where it goes on."""
        place = path if "://" in path else f"{self._endpoint}/api/datasets/{self._url.repository}/{path}"
        for _ in range(_HOPS_MAX):
            answer = self._get(place, {}, _ANSWER_BYTES_MAX)
            if answer.status not in _MOVED:
                break
            place = urljoin(place, answer.headers.get("Location", ""))
        self._check(answer, "list")
        onward = _NEXT.search(answer.headers.get("Link", ""))
        try:
            return json.loads(answer.data), onward and urljoin(place, onward[1])
        except ValueError as error:
            raise RefusedError(
                f"{self._url.root}: {self._endpoint} answers without JSON; is HF_ENDPOINT a Hub?"
            ) from error

    def _get(self, url: str, headers: dict[str, str], bytes_max: int) -> _Answer:
        """One answer; waits where the server asks for that. Messages have neither the token nor a signed place."""
        if self._token and self._is_hub(url):
            headers = {**headers, "Authorization": f"Bearer {self._token}"}
        waited_s = 0.0
        while True:
            try:
                got = self._pool.request("GET", url, headers=headers, redirect=False, preload_content=False)
                data = got.read(bytes_max)
                (got.release_conn if got.length_remaining == 0 else got.close)()  # what is left of it is nobody's
            except (urllib3.exceptions.HTTPError, ValueError) as error:
                what = f"{self._url.root}: {urlsplit(url).hostname} does not answer ({type(error).__name__})"
                raise StoreUnreachableError(f"{what}; try again, or correct HF_ENDPOINT") from None
            said = got.headers.get("Retry-After", "")
            if got.status != HTTPStatus.TOO_MANY_REQUESTS and not (
                got.status == HTTPStatus.SERVICE_UNAVAILABLE and said
            ):
                return _Answer(got.status, got.headers, data)
            pause_s = max(float(said), 1.0) if said.isdecimal() else _WAIT_S
            waited_s += pause_s
            if waited_s > _WAIT_MAX_S:
                raise StoreUnreachableError(
                    f"{self._url.root}: {urlsplit(url).hostname} is busy ({got.status}); try again later"
                )
            time.sleep(pause_s)

    def _is_hub(self, url: str) -> bool:
        return urlsplit(url)[:2] == urlsplit(self._endpoint)[:2]

    def _check(self, answer: _Answer, doing: str) -> None:
        if answer.status in _DENIED:
            have = "HF_TOKEN may not" if self._token else "without HF_TOKEN nobody may"
            raise RefusedError(
                f"{self._url.root}: {have} {doing} there, or there is no such data set; accept its terms, or correct it"
            )
        if answer.status == HTTPStatus.NOT_FOUND:
            raise AbsentError(f"{self._url.root}: no such data set, revision or directory; correct the URL")
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise StoreUnreachableError(f"{self._url.root}: {self._endpoint} fails ({answer.status}); try again later")
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise RefusedError(
                f"{self._url.root}: cannot {doing}: {self._endpoint} answers {answer.status}; correct the URL"
            )
