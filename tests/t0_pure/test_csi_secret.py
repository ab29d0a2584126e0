"""What the Secret of a volume may say to the process that starts its mount, which is root of the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepfs.csi.holder import SECRET, environment_of
from stepfs.errors import UsageError
from stepfs.store.settings import SECRETS

AWS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
ROLE = {
    "AWS_ROLE_ARN": "arn", "AWS_ROLE_SESSION_NAME": "s", "AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_CONTAINER_CREDENTIALS_FULL_URI": "u",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "/t", "AWS_PROFILE": "p", "AWS_DEFAULT_PROFILE": "p", "AWS_CONFIG_FILE": "/c",
    "AWS_SHARED_CREDENTIALS_FILE": "/c", "AWS_SESSION_TOKEN": "t", "AWS_SECURITY_TOKEN": "t", "BOTO_CONFIG": "/b",
    "GOOGLE_APPLICATION_CREDENTIALS": "/g", "GOOGLE_SERVICE_ACCOUNT": "/g", "CLOUDSDK_CONFIG": "/g", "AZURE_CLIENT_ID": "i",
    "AZURE_TENANT_ID": "i", "AZURE_FEDERATED_TOKEN_FILE": "/t", "AZURE_AUTHORITY_HOST": "h", "AZURE_STORAGE_ACCOUNT_KEY": "k",
}  # fmt: skip
NODE = {
    "PATH": "/bin",
    "AWS_ENDPOINT_URL_S3": "http://s3",
    "AWS_RETRY_MODE": "standard",
    "AZURE_STORAGE_ENDPOINT": "http://a",
}
DIRECTORY = Path("/nowhere")


@pytest.mark.parametrize(
    "name",
    [*sorted(ROLE.keys() - SECRET), "AWS_ENDPOINT_URL_STS", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_STS_REGIONAL_ENDPOINTS",
     "AWS_DATA_PATH", "AWS_LOGIN_CACHE_DIRECTORY", "GOOGLE_PROXY_URL", "AZURE_MSI_ENDPOINT", "HTTPS_PROXY", "SSL_CERT_FILE", "PATH",
     "LD_PRELOAD", "PYTHONPATH", "STEPFS_LOG_DIR", "STEPFS_NEAR", "aws_access_key_id", "AWS_REGION ", ""],
)  # fmt: skip
def test_what_names_a_file_a_program_a_profile_or_a_token_service_is_refused(name):
    with pytest.raises(UsageError, match=r"^the secret has the keys .*; it may have AWS_REGION, .*, no others$"):
        environment_of(AWS | {name: "x"}, DIRECTORY, NODE)


@pytest.mark.parametrize(
    "keys",
    [AWS, {"GOOGLE_SERVICE_ACCOUNT_KEY": "{}"}, {"AZURE_STORAGE_ACCOUNT_KEY": "k"}, {"AZURE_STORAGE_SAS_TOKEN": "s"}],
)
def test_keys_put_the_drivers_own_role_aside_and_what_the_node_says_of_stores_stays(keys):
    assert environment_of(keys, DIRECTORY, NODE | ROLE) == NODE | keys


@pytest.mark.parametrize("secret", [{}, {"AWS_REGION": "eu-1"}, {"STEPFS_SSE": "aws:kms", "AWS_ACCESS_KEY_ID": "\n"}])
def test_without_keys_the_role_is_the_drivers(secret):
    assert environment_of(secret, DIRECTORY, NODE | ROLE).items() >= (NODE | ROLE).items()


@pytest.mark.parametrize(
    ("secret", "advice"),
    [
        ({"AWS_ENDPOINT_URL_S3": "http://me"}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ENDPOINT_URL": "http://me", "AWS_ACCESS_KEY_ID": "id"}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({"AWS_SECRET_ACCESS_KEY": "key", "AWS_ACCESS_KEY_ID": " "}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({"AWS_CA_BUNDLE": "-----BEGIN CERTIFICATE-----"}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (AWS | {"GOOGLE_BASE_URL": "http://me"}, "GOOGLE_SERVICE_ACCOUNT_KEY"),
        (AWS | {"AZURE_STORAGE_ENDPOINT": "http://me"}, "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"),
    ],
)
def test_the_drivers_own_keys_go_to_no_server_that_a_secret_names(secret, advice):
    with pytest.raises(UsageError, match=f"but not all of its keys; add {advice}$"):
        environment_of(secret, DIRECTORY, NODE | ROLE)


def test_an_endpoint_is_the_stores_alone_and_a_value_loses_the_break_that_base64_added():
    found = environment_of(AWS | {"AWS_ENDPOINT_URL": "http://me\n"}, DIRECTORY, {})
    assert found == AWS | {"AWS_ENDPOINT_URL_S3": "http://me"}
    both = {"AWS_ENDPOINT_URL": "http://me", "AWS_ENDPOINT_URL_S3": "http://s3"}
    assert environment_of(AWS | both, DIRECTORY, {}) == AWS | {"AWS_ENDPOINT_URL_S3": "http://s3"}


@pytest.mark.parametrize("text", ["/etc/shadow", "../ca.pem", "-----BEGIN PRIVATE KEY-----"])
def test_an_authority_is_a_text_and_no_path(text, tmp_path):
    with pytest.raises(UsageError, match="the certificate itself"):
        environment_of(AWS | {"AWS_CA_BUNDLE": text}, tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_no_log_shows_what_a_secret_has_to_hide():
    assert {name for name in SECRET if "SECRET" in name or "TOKEN" in name or name.endswith("_KEY")} <= set(SECRETS)
