"""Objects that are no part of a lake: any key, listed and read in ranges by worker processes, without an event loop.

An object is read with the etag of its listing (`If-Match`), so that one that was replaced is refused, not mixed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from typing import Final, NamedTuple

from stepfs.errors import AbsentError, RefusedError, StepfsError
from stepfs.store.servers import Verdict, explain
from stepfs.store.s3.clients import Clients
from stepfs.store.s3.errors import FAILURES, broke_in_body, read_error
from stepfs.store.settings import S3

_TIMEOUT_S: Final = 20.0  # without a byte
_ATTEMPTS_MAX: Final = 4
_RESTORE: Final = "restore it, or give the source a new name to begin it anew"


class ListedObject(NamedTuple):
    """An object as LIST shows it."""

    key: str
    size: int
    etag: str


class ReadOnlyBucket:
    """A bucket of the user's. Thread-safe; no request before the first call; not usable across a fork.

    `endpoint_url` None: the AWS chain's. `profile`: a section of the AWS configuration files, for sources with
    credentials other than the lake's.
    """

    def __init__(self, bucket: str, *, endpoint_url: str | None = None, profile: str | None = None) -> None:
        self.bucket = bucket
        self._clients = Clients(endpoint_url, _TIMEOUT_S, _TIMEOUT_S, profile=profile)

    def list(self, prefix: str) -> Iterator[ListedObject]:
        """Objects whose keys begin with `prefix`. `AbsentError`: no such bucket."""
        try:
            pages = self._clients.data().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=prefix):
                for item in page.get("Contents", []):
                    yield ListedObject(item["Key"], item["Size"], item.get("ETag", ""))
        except FAILURES as error:
            raise self._explained(error, f"list {prefix}") from error

    def read(self, key: str, begin: int, end: int, etag: str) -> bytes:
        """Bytes `begin` … `end` - 1 of the object with that etag.

        `RefusedError` if it is gone, was replaced or is shorter; `StoreUnreachableError` if the server does not answer.
        """
        found = bytearray()
        for attempt in range(_ATTEMPTS_MAX):
            try:
                self._read_on(key, begin, end, etag, found)
            except FAILURES as error:
                answer = read_error(error)
                if answer.verdict is Verdict.ABSENT:
                    raise RefusedError(f"s3://{self.bucket}/{key} is gone; {_RESTORE}") from error
                if answer.status == HTTPStatus.PRECONDITION_FAILED:
                    raise self._replaced(key) from error
                if answer.verdict is Verdict.PAST_END:
                    break
                if attempt + 1 == _ATTEMPTS_MAX or not broke_in_body(error):
                    raise self._explained(error, f"read {key}") from error
            if len(found) == end - begin:
                return bytes(found)
        raise RefusedError(f"s3://{self.bucket}/{key} is shorter than listed; {_RESTORE}")

    def _read_on(self, key: str, begin: int, end: int, etag: str, found: bytearray) -> None:
        first = begin + len(found)
        answer = self._clients.data().get_object(
            Bucket=self.bucket, Key=key, Range=f"bytes={first}-{end - 1}", IfMatch=etag
        )
        with closing(answer["Body"]) as body:
            if answer.get("ETag") != etag:  # a server that ignores If-Match
                raise self._replaced(key)
            if not answer.get("ContentRange", "").startswith(f"bytes {first}-"):
                raise RefusedError(f"s3://{self.bucket}/{key}: the server ignores Range requests; use another server")
            while piece := body.read(1 << 20):
                found += piece

    def _replaced(self, key: str) -> StepfsError:
        return RefusedError(f"s3://{self.bucket}/{key} was replaced since it was listed (other etag); {_RESTORE}")

    def _explained(self, error: Exception, doing: str) -> StepfsError:
        explained = explain(read_error(error), f"s3://{self.bucket}", doing, S3)
        if isinstance(explained, AbsentError):
            return AbsentError(f"bucket {self.bucket} of the source does not exist; correct the URL")
        return explained
