"""gs://bucket[/prefix]: Google's XML interface, where a create is `x-goog-if-generation-match: 0`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from obstore.store import GCSStore

from stepfs.store.cloud.place import Place, endpoint_from
from stepfs.store.cloud.settings import GOOGLE

if TYPE_CHECKING:
    from obstore import PutResult
    from obstore.store import ClientConfig, GCSCredentialProvider, RetryConfig

_OWN: Final = (
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SKIP_SIGNATURE",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)
_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_write"


def google_place(bucket: str, prefix: str) -> Place:
    """The place of gs://`bucket`/`prefix`; no request."""
    endpoint = endpoint_from(("GOOGLE_BASE_URL",), "https://storage.googleapis.com")

    def make(options: ClientConfig, retries: RetryConfig) -> GCSStore:
        return GCSStore(
            bucket,
            config={"base_url": endpoint},
            client_options=options,
            retry_config=retries,
            credential_provider=_provider(),
        )

    url = f"gs://{bucket}/{prefix}".rstrip("/")
    return Place(url, prefix, endpoint, GOOGLE, 1, 1000, make, _has_generation)


def _has_generation(result: PutResult) -> bool:
    return (result["version"] or "").isdigit()


def _provider() -> GCSCredentialProvider | None:
    """google-auth, which knows federation, if it is installed and finds credentials; else obstore's own chain."""
    if any(map(os.environ.get, _OWN)):
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
