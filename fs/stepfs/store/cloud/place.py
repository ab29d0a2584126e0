"""The place of a lake in a cloud, and the common settings of its clients."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from stepfs.errors import RefusedError, UsageError
from stepfs.store.settings import Words

if TYPE_CHECKING:
    from obstore import PutResult
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig

    Client = AzureStore | GCSStore

_CONNECT_S: Final = 5.0
_IDLE_S: Final = 10.0  # a middlebox may drop an idle connection silently
_REQUEST_S: Final = 3600.0  # a silent server ends a request, a long body does not
_users: Final[set[int]] = set()  # this process, or those it was forked from, once one has made a client


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix of a bucket or container; `make` makes its clients.

    `wrote`: whether the answer to a single write is the store's own. obstore follows a redirect, and a login page may have
    an ETag.
    """

    url: str
    prefix: str
    endpoint: str
    words: Words
    keys_per_delete: int  # of one request
    keys_per_page: int
    make: Callable[[ClientConfig, RetryConfig], Client]
    wrote: Callable[[PutResult], bool]

    def client(self, timeout_s: float, *, retries: int = 0) -> Client:
        """A client for any thread. `timeout_s`: without a byte, or for a whole body on its way up."""
        if _users - {os.getpid()}:  # obstore's threads do not survive a fork: a request would wait for ever
            raise RefusedError(
                "this process was forked after a gs:// or az:// store was used; start it by spawn or forkserver"
                ' (of a DataLoader: multiprocessing_context="spawn")'
            )
        _users.add(os.getpid())
        options: ClientConfig = {
            "allow_http": self.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "pool_idle_timeout": timedelta(seconds=_IDLE_S),
            "read_timeout": timedelta(seconds=timeout_s),
            "timeout": timedelta(seconds=_REQUEST_S),
            "user_agent": "stepfs",
        }
        return self.make(options, {"max_retries": retries})


def endpoint_from(variables: tuple[str, ...], default: str) -> str:
    """The first one set; `UsageError` unless it is the URL of a server, without credentials."""
    named = next(filter(None, map(os.environ.get, variables)), default)
    parts = urlsplit(named)
    if "@" in parts.netloc or parts.query:
        raise UsageError(f"credentials do not belong into an endpoint URL; take them out of {variables[0]}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{variables[0]} {named!r}: write a URL such as https://host:port")
    return named.rstrip("/")
