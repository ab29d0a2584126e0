"""Opening gs:// and az://: URLs, endpoints, and the package that they need."""

from __future__ import annotations

import subprocess
import sys

import cloudservers
import pytest
from stubs3 import stub_s3

from stepfs.errors import MissingPackageError, UsageError
from stepfs.store.opening import open_store


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://", "'' is not a bucket name; write gs://bucket/prefix"),
        ("gs://B/", "'B' is not a bucket name; write gs://bucket/prefix"),
        ("gs://bucket/a/../b", "not an object key"),
        ("az://", "'' is not an account name; write az://account/container/prefix"),
        ("az://account", "'' is not a container name; write az://account/container/prefix"),
        ("az://account/", "'' is not a container name; write az://account/container/prefix"),
        ("az://my-account/container", "'my-account' is not an account name"),
        ("gs://user:secret@bucket/a", "credentials and options do not belong into a URL"),
        ("az://account/container?sig=secret", "do not belong into a URL; check AZURE_STORAGE_ACCOUNT_KEY"),
        ("azure://account/container", "unknown scheme 'azure'; write file:///directory, s3://.*or az://"),
    ],
)
def test_bad_urls_are_refused_before_anything_is_touched(url, message):
    with pytest.raises(UsageError, match=message) as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


def test_a_bucket_of_google_may_have_underscores_and_dots():
    assert open_store("gs://my_bucket.of.example.com/x").url == "gs://my_bucket.of.example.com/x"
    with pytest.raises(UsageError, match="'my_container' is not a container name"):
        open_store("az://account/my_container")


async def test_the_url_alone_says_where_a_lake_lies(monkeypatch):
    """obstore reads more of the environment than is wanted here."""
    for name in ("GOOGLE_BUCKET", "AZURE_CONTAINER_NAME", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    with stub_s3() as stub:
        monkeypatch.setenv("GOOGLE_BASE_URL", stub.endpoint_url)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "x")
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{stub.endpoint_url}/account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", cloudservers.KEY)
        for url in ("gs://bucket/lake", "az://account/container/lake"):
            assert await open_store(url).get("a") is None
    assert [path for _, path in stub.requests] == ["/bucket/lake%2Fa", "/account/container/lake/a"]


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("nonsense", "'nonsense': write a URL such as https://host:port"),
        ("ftp://host", "write a URL such as https://host:port"),
        ("https://user:secret@host", "credentials do not belong into an endpoint URL"),
        ("https://host/account?sig=secret", "credentials do not belong into an endpoint URL"),
    ],
)
@pytest.mark.parametrize("url", ["gs://bucket/x", "az://account/container/x"])
def test_an_endpoint_that_cannot_work_is_named(monkeypatch, url, endpoint, message):
    monkeypatch.setenv("GOOGLE_BASE_URL", endpoint)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    with pytest.raises(UsageError, match=message) as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("url", "extra"), [("gs://bucket/x", "gcs"), ("az://account/container/x", "azure")])
def test_without_its_extra_a_url_names_it(monkeypatch, url, extra):
    for name in [name for name in sys.modules if name.startswith("stepfs.store.cloud.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingPackageError, match=rf"needs the package obstore.*'stepfs\[{extra}\]'"):
        open_store(url)


def test_other_urls_import_nothing_of_it():
    program = (
        "import sys, stepfs.store.opening as o; o.open_store('file:///nowhere'); o.open_store('s3://bucket/x'); "
        "sys.exit('obstore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
