"""Objects of sources at Google and in Azure, by obstore. An answer with another etag than the listed one is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import obstore
from obstore.exceptions import BaseError

from stepfs.errors import AbsentError, StepfsError
from stepfs.store.cloud.errors import read_answer, unusable
from stepfs.store.cloud.place import Client, Place
from stepfs.store.listed import ListedObject, gone, replaced, shorter
from stepfs.store.server_answers import Verdict, explain

_TIMEOUT_S: Final = 20.0  # without a byte
_RETRIES: Final = 3  # of obstore itself


class ReadOnlyPlace:
    """The bucket or container of a place, whole: see `stepfs.store.listed.Bucket`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._making = threading.Lock()
        self._client: Client | None = None

    def list(self, prefix: str) -> Iterator[ListedObject]:
        directory = prefix[: prefix.rfind("/") + 1]  # obstore lists directories alone
        last = prefix[-1:]
        before = f"{prefix[:-1]}{chr(ord(last) - 1)}~" if last.isascii() and last.isalnum() else None
        try:
            rows_max = self._place.keys_per_page
            for page in obstore.list(self._opened(), directory or None, offset=before, chunk_size=rows_max):
                if page and page[0]["path"] > prefix and not page[0]["path"].startswith(prefix):
                    return
                for row in page:
                    if row["path"].startswith(prefix):
                        yield ListedObject(row["path"], row["size"], _etag(row["e_tag"]))
        except (BaseError, OSError) as error:
            raise self._explained(error, f"list {prefix}") from error

    def read(self, key: str, begin: int, end: int, etag: str) -> bytes:
        url = f"{self._place.url}/{key}"
        try:
            answer = obstore.get(self._opened(), key, options={"range": (begin, end)})
            if _etag(answer.meta["e_tag"]) != etag:
                raise replaced(url)
            found = bytes(answer.bytes())
        except (BaseError, OSError) as error:
            verdict = read_answer(str(error)).verdict
            if verdict is Verdict.ABSENT:
                raise gone(url) from error
            if verdict is Verdict.PAST_END:
                raise shorter(url) from error
            raise self._explained(error, f"read {key}") from error
        if len(found) != end - begin:
            raise shorter(url)
        return found

    def _opened(self) -> Client:
        with self._making:
            if self._client is None:
                try:
                    self._client = self._place.client(_TIMEOUT_S, retries=_RETRIES)
                except BaseError as error:
                    raise explain(unusable(str(error)), self._place.url, "open", self._place.words) from None
            return self._client

    def _explained(self, error: Exception, doing: str) -> StepfsError:
        explained = explain(read_answer(str(error)), self._place.url, doing, self._place.words)
        if isinstance(explained, AbsentError):
            return AbsentError(f"{self._place.url} of the source does not exist; correct the URL")
        return explained


def _etag(text: str | None) -> str:
    """The ETag without quotes: Azure's LIST has none, and its GET has."""
    return (text or "").strip('"')
