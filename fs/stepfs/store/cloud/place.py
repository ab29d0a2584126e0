"""The place of a lake at Google (gs://bucket/prefix) or in Azure (az://account/container/prefix): endpoint, clients, credentials.

A create is `x-goog-if-generation-match: 0` on Google's XML interface, and `If-None-Match: *` on Azure.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore

from stepfs.errors import RefusedError, UsageError
from stepfs.store.settings import AZURE, GOOGLE, SECRETS, StoreTexts

if TYPE_CHECKING:
    from obstore import PutResult
    from obstore.store import AzureCredentialProvider, ClientConfig, GCSCredentialProvider

Client = AzureStore | GCSStore
_CONNECT_S: Final = 5.0
_IDLE_S: Final = 10.0  # a middlebox may drop an idle connection silently
_REQUEST_S: Final = 3600.0  # a silent server ends a request, a long body does not
_OF_AZURE: Final = ("AZURE_SKIP_SIGNATURE", *(name for name in SECRETS if name.startswith("AZURE_STORAGE_")))
_OF_GOOGLE: Final = (
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SKIP_SIGNATURE",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)
_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_write"
_users: Final[set[int]] = set()  # this process, or those it was forked from, once one has made a client


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix of a bucket or container; `make` makes its clients, `provider` their credentials, None for obstore's chain.

    `wrote`: whether the answer to a single write is the store's own. obstore follows a redirect, and a login page may have
    an ETag.
    """

    url: str
    prefix: str
    endpoint: str
    words: StoreTexts
    keys_per_delete: int  # of one request
    keys_per_page: int
    make: Callable[..., Client]
    provider: Callable[[], GCSCredentialProvider | AzureCredentialProvider | None]
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
        retry = {"max_retries": retries}
        return self.make(client_options=options, retry_config=retry, credential_provider=self.provider())


def google_place(bucket: str, prefix: str) -> Place:
    endpoint = endpoint_from(("GOOGLE_BASE_URL",), "https://storage.googleapis.com")
    return Place(
        f"gs://{bucket}/{prefix}".rstrip("/"),
        prefix,
        endpoint,
        GOOGLE,
        keys_per_delete=1,
        keys_per_page=1000,
        make=partial(GCSStore, bucket, config={"base_url": endpoint}),
        provider=_google_provider,
        wrote=lambda result: (result["version"] or "").isdigit(),  # a generation
    )


def azure_place(account: str, container: str, prefix: str) -> Place:
    default = f"https://{account}.blob.core.windows.net"
    endpoint = endpoint_from(("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"), default)
    return Place(
        f"az://{account}/{container}/{prefix}".rstrip("/"),
        prefix,
        endpoint,
        AZURE,
        keys_per_delete=256,
        keys_per_page=5000,
        make=partial(
            AzureStore,
            container,
            config={"account_name": account, "endpoint": endpoint, "use_emulator": False},
        ),
        provider=_azure_provider,
        wrote=lambda result: (result["e_tag"] or "").startswith('"0x'),
    )


def endpoint_from(variables: tuple[str, ...], default: str) -> str:
    """The first one set; `UsageError` unless it is the URL of a server, without credentials."""
    named = next(filter(None, map(os.environ.get, variables)), default)
    parts = urlsplit(named)
    if "@" in parts.netloc or parts.query:
        raise UsageError(f"credentials do not belong into an endpoint URL; take them out of {variables[0]}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{variables[0]} {named!r}: write a URL such as https://host:port")
    return named.rstrip("/")


def _google_provider() -> GCSCredentialProvider | None:
    """google-auth, which knows federation, if it is installed and finds credentials; else obstore's own chain."""
    if any(map(os.environ.get, _OF_GOOGLE)):
        return None
    try:
        import google.auth  # noqa: PLC0415 - half a second
        from google.auth.credentials import with_scopes_if_required  # noqa: PLC0415
        from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415
        from obstore.auth.google import GoogleCredentialProvider  # noqa: PLC0415
    except ImportError:
        return None
    try:
        # The scopes come second: with them `default` asks a server for the name of a project.
        return GoogleCredentialProvider(with_scopes_if_required(google.auth.default()[0], [_SCOPE]))
    except GoogleAuthError:
        return None


def _azure_provider() -> AzureCredentialProvider | None:
    """azure-identity, if it is installed and no key is set; else obstore's own chain."""
    if any(map(os.environ.get, _OF_AZURE)):
        return None
    try:
        from obstore.auth.azure import AzureCredentialProvider  # noqa: PLC0415 - half a second
    except ImportError:
        return None
    # Our own error sums up its twenty lines.
    logging.getLogger("azure.identity").setLevel(logging.ERROR)
    return AzureCredentialProvider()
