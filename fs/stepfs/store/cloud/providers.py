"""Google (gs://bucket/prefix) and Azure (az://account/container/prefix): endpoints, clients, credentials.

A create is `x-goog-if-generation-match: 0` on Google's XML interface, and `If-None-Match: *` on Azure.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from obstore.store import AzureStore, GCSStore

from stepfs.store.cloud.place import Place, endpoint_from
from stepfs.store.settings import AZURE, GOOGLE, SECRETS

if TYPE_CHECKING:
    from obstore import PutResult
    from obstore.store import AzureCredentialProvider, ClientConfig, GCSCredentialProvider, RetryConfig

_OF_AZURE: Final = ("AZURE_SKIP_SIGNATURE", *(name for name in SECRETS if name.startswith("AZURE_STORAGE_")))
_OF_GOOGLE: Final = (
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
            credential_provider=_google_provider(),
        )

    url = f"gs://{bucket}/{prefix}".rstrip("/")
    return Place(url, prefix, endpoint, GOOGLE, 1, 1000, make, _has_generation)


def azure_place(account: str, container: str, prefix: str) -> Place:
    """The place of az://`account`/`container`/`prefix`; no request."""
    default = f"https://{account}.blob.core.windows.net"
    endpoint = endpoint_from(("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"), default)

    def make(options: ClientConfig, retries: RetryConfig) -> AzureStore:
        return AzureStore(
            container,
            config={"account_name": account, "endpoint": endpoint, "use_emulator": False},
            client_options=options,
            retry_config=retries,
            credential_provider=_azure_provider(),
        )

    url = f"az://{account}/{container}/{prefix}".rstrip("/")
    return Place(url, prefix, endpoint, AZURE, 256, 5000, make, _has_azure_tag)


def _has_generation(result: PutResult) -> bool:
    return (result["version"] or "").isdigit()


def _has_azure_tag(result: PutResult) -> bool:
    return (result["e_tag"] or "").startswith('"0x')


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
