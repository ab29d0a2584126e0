"""Objects that are no part of a lake: any key, listed and read in ranges by worker processes, without an event loop.

An object is read with the etag of its listing (`If-Match`), so that one that was replaced is refused, not mixed in.
"""

from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from typing import Final

from stepfs.errors import AbsentError, RefusedError, StepfsError
from stepfs.store.listed import ListedObject, gone, replaced, shorter
from stepfs.store.s3.clients import Clients
from stepfs.store.s3.errors import FAILURES, broke_in_body, read_error
from stepfs.store.server_answers import Verdict, explain
from stepfs.store.settings import S3, of_profile

_TIMEOUT_S: Final = 20.0  # without a byte
_ATTEMPTS_MAX: Final = 4


class ReadOnlyBucket:
    """A `stepfs.store.listed.Bucket`.

    `endpoint_url` None: the AWS chain's. `profile`: a section of the AWS configuration files, for sources with
    credentials other than the lake's.
    """

    def __init__(self, bucket: str, *, endpoint_url: str | None = None, profile: str | None = None) -> None:
        self.bucket = bucket
        self._clients = Clients(endpoint_url, _TIMEOUT_S, _TIMEOUT_S, profile=profile)

    def list(self, prefix: str) -> Iterator[ListedObject]:
        try:
            pages = self._clients.data().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=prefix):
                for item in page.get("Contents", []):
                    yield ListedObject(item["Key"], item["Size"], item.get("ETag", ""))
        except FAILURES as error:
            raise self._explained(error, f"list {prefix}") from error

    def read(self, key: str, begin: int, end: int, etag: str) -> bytes:
        found = bytearray()
        for attempt in range(_ATTEMPTS_MAX):
            try:
                self._read_on(key, begin, end, etag, found)
            except FAILURES as error:
                answer = read_error(error)
                if answer.verdict is Verdict.ABSENT:
                    raise gone(self._url(key)) from error
                if answer.status == HTTPStatus.PRECONDITION_FAILED:
                    raise replaced(self._url(key)) from error
                if answer.verdict is Verdict.PAST_END:
                    break
                if attempt + 1 == _ATTEMPTS_MAX or not broke_in_body(error):
                    raise self._explained(error, f"read {key}") from error
            if len(found) == end - begin:
                return bytes(found)
        raise shorter(self._url(key))

    def _read_on(self, key: str, begin: int, end: int, etag: str, found: bytearray) -> None:
        first = begin + len(found)
        answer = self._clients.data().get_object(
            Bucket=self.bucket, Key=key, Range=f"bytes={first}-{end - 1}", IfMatch=etag
        )
        with closing(answer["Body"]) as body:
            if answer.get("ETag") != etag:  # a server that ignores If-Match
                raise replaced(self._url(key))
            if not answer.get("ContentRange", "").startswith(f"bytes {first}-"):
                raise RefusedError(f"{self._url(key)}: the server ignores Range requests; use another server")
            while piece := body.read(1 << 20):
                found += piece

    def _url(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def _explained(self, error: Exception, doing: str) -> StepfsError:
        words = S3 if self._clients.profile is None else of_profile(self._clients.profile)
        explained = explain(read_error(error), f"s3://{self.bucket}", doing, words)
        if isinstance(explained, AbsentError):
            return AbsentError(f"bucket {self.bucket} of the source does not exist; correct the URL")
        return explained
