"""The settings of users for their stores: names and advice, without boto3 or obstore, for every room that speaks of them."""

from dataclasses import dataclass, replace
from typing import Final

PREFIXES: Final = ("AWS_", "S3_", "AZURE_", "CLOUDSDK_", "GOOGLE_", "SSL_CERT_")  # of environment variables
SECRETS: Final = (  # that no log may show
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
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
S3_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
SET_S3_KEYS: Final = "set AWS_ACCESS_KEY_ID or AWS_PROFILE instead"
DATA_THREADS_MAX: Final = 32  # of a store on a server: see `calls`
CONTROL_THREADS_MAX: Final = 16
COMMIT_THREADS_MAX: Final = 16
_TRUST: Final = "set {} to its authority's certificate, or correct the endpoint"


@dataclass(frozen=True, slots=True)
class StoreTexts:
    """How a message speaks of one kind of store. `check_*`, `trust`: advice."""

    form: str  # of a URL
    container: str  # the word for a bucket
    check_network: str
    check_keys: str
    trust: str = _TRUST.format("SSL_CERT_FILE")
    extra: str = ""  # of the package


S3: Final = StoreTexts(
    form="s3://bucket/prefix",
    container="bucket",
    check_network="check the network and AWS_ENDPOINT_URL_S3, then retry",
    check_keys="check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    trust=_TRUST.format("AWS_CA_BUNDLE"),
)


def of_profile(name: str) -> StoreTexts:
    """Of what is read with the server and the keys of the AWS profile `name`: those of the environment do not count."""
    of = f"of the AWS profile [{name}]"
    return replace(
        S3,
        check_network=f"check the network and the endpoint_url {of}, then retry",
        check_keys=f"check the keys {of}, which are used instead of the environment's",
        trust=_TRUST.format(f"the ca_bundle {of}"),
    )


GOOGLE: Final = StoreTexts(
    form="gs://bucket/prefix",
    container="bucket",
    check_network="check the network and GOOGLE_BASE_URL, then retry",
    check_keys="check GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    extra="gcs",
)
AZURE: Final = StoreTexts(
    form="az://account/container/prefix",
    container="container",
    check_network="check the account's name, the network and AZURE_STORAGE_ENDPOINT, then retry",
    check_keys="check AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or run `az login`",
    extra="azure",
)
