"""Objects that are no part of a lake, as sources read them: listed by prefix, read in ranges of the version that was listed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

from stepfs.errors import RefusedError

ADVICE: Final = "restore it, or run again with --accept-changes to go on with what is there"


class ListedObject(NamedTuple):
    """An object as LIST shows it."""

    key: str
    size: int
    etag: str


class Bucket(Protocol):
    """A bucket or container of the user's. Thread-safe; no request before the first call; not usable across a fork."""

    def list(self, prefix: str) -> Iterator[ListedObject]:
        """Objects whose keys begin with `prefix`. `AbsentError`: no such bucket."""
        ...

    def read(self, key: str, begin: int, end: int, etag: str) -> bytes:
        """Bytes `begin` … `end` - 1 of the object with that etag.

        `RefusedError` if it is gone, was replaced or is shorter; `StoreUnreachableError` if the server does not answer.
        """
        ...


def gone(url: str) -> RefusedError:
    return RefusedError(f"{url} is gone; {ADVICE}")


def replaced(url: str) -> RefusedError:
    return RefusedError(f"{url} was replaced since it was listed (other etag); {ADVICE}")


def shorter(url: str) -> RefusedError:
    return RefusedError(f"{url} is shorter than listed; {ADVICE}")
