"""az://account/container[/prefix]: Azure Blob Storage, where a create is `If-None-Match: *`."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from obstore.store import AzureStore

from stepfs.store.cloud.place import Place, endpoint_from
from stepfs.store.cloud.settings import AZURE, SECRETS

if TYPE_CHECKING:
    from obstore import PutResult
    from obstore.store import AzureCredentialProvider, ClientConfig, RetryConfig

_OWN: Final = ("AZURE_SKIP_SIGNATURE", *(name for name in SECRETS if name.startswith("AZURE_STORAGE_")))


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
            credential_provider=_provider(),
        )

    url = f"az://{account}/{container}/{prefix}".rstrip("/")
    return Place(url, prefix, endpoint, AZURE, 256, 5000, make, _has_azure_tag)


def _has_azure_tag(result: PutResult) -> bool:
    return (result["e_tag"] or "").startswith('"0x')


def _provider() -> AzureCredentialProvider | None:
    """azure-identity, if it is installed and no key is set; else obstore's own chain."""
    if any(map(os.environ.get, _OWN)):
        return None
    try:
        from obstore.auth.azure import AzureCredentialProvider  # noqa: PLC0415 - half a second
    except ImportError:
        return None
    # Our own error sums up its twenty lines.
    logging.getLogger("azure.identity").setLevel(logging.ERROR)
    return AzureCredentialProvider()
