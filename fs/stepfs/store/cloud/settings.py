"""The settings of users for Google and Azure: names and advice, without obstore, for every room that speaks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PREFIXES: Final = ("AZURE_", "CLOUDSDK_", "GOOGLE_", "SSL_CERT_")  # of environment variables
SECRETS: Final = (
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)
TRUST: Final = "set SSL_CERT_FILE to its authority's certificate, or correct the endpoint"


@dataclass(frozen=True, slots=True)
class Words:
    """How a message speaks of one cloud. `check_*`: advice."""

    form: str  # of a URL
    extra: str
    container: str  # the cloud's word for a bucket
    check_network: str
    check_keys: str


GOOGLE: Final = Words(
    form="gs://bucket/prefix",
    extra="gcs",
    container="bucket",
    check_network="check the network and GOOGLE_BASE_URL, then retry",
    check_keys="check GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
)
AZURE: Final = Words(
    form="az://account/container/prefix",
    extra="azure",
    container="container",
    check_network="check the account's name, the network and AZURE_STORAGE_ENDPOINT, then retry",
    check_keys="check AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or run `az login`",
)
