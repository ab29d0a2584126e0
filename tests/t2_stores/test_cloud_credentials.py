"""Credentials of gs:// and az://: missing, wrong, senseless, or from a package that is installed."""

from __future__ import annotations

import os
import re
import sys
import traceback

import pytest
import servers
from finished import ran
from stubs3 import stub_s3, xml_error

from stepfs.errors import RefusedError
from stepfs.store.opening import open_store


async def test_a_wrong_key_is_refused_and_not_shown(az_url, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmcta2V5")
    store = open_store(az_url)
    for call in (lambda: store.get("a"), lambda: store.create("a", b""), lambda: store.put("a", [b""])):
        with pytest.raises(RefusedError, match=r"403 .*check AZURE_STORAGE_ACCOUNT_KEY") as refused:
            await call()
        assert "d3Jvbmcta2V5" not in str(refused.value)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "%wrong%")
    with pytest.raises(RefusedError, match=r"Invalid Access Key.*; check AZURE_STORAGE_ACCOUNT_KEY"):
        await open_store(az_url).get("a")


async def test_credentials_that_cannot_be_had_are_refused_with_what_to_check(google, azurite, monkeypatch):
    """`AZURE_MSI_ENDPOINT`: not the one of the machine that runs this test."""
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"http://127.0.0.1:{servers.free_port_of_nobody()}/")
    for home, advice in [
        (google.home, "check GOOGLE_APPLICATION_CREDENTIALS"),
        (azurite.home, "check AZURE_STORAGE_ACCOUNT_KEY"),
    ]:
        store = open_store(f"{home}/x")
        for call in (lambda: store.get("a"), lambda: store.create("a", b""), lambda: store.list("")):  # noqa: B023
            with pytest.raises(RefusedError, match=advice):
                await call()


@pytest.mark.parametrize(
    ("url", "name", "value", "said"), [
        ("az://account/container/x", "AZURE_STORAGE_SAS_TOKEN", "secret", "Missing component in SAS query pair"),
        ("gs://bucket/x", "GOOGLE_SERVICE_ACCOUNT_KEY", '"{\\"private_key\\": \\"secret\\"}"',
         "invalid type: string …"),
        ("gs://bucket/x", "GOOGLE_SKIP_SIGNATURE", "secret", "failed to parse … as boolean"),
    ],
)  # fmt: skip
async def test_settings_that_make_no_sense_are_no_outage_and_not_shown(monkeypatch, url, name, value, said):
    for other in [each for each in os.environ if each.startswith(("AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, value)
    store = open_store(url)
    for call in (lambda: store.get("a"), lambda: store.create("a", b"")):
        with pytest.raises(RefusedError, match=f"no credentials can be used .*{said}.*; check ") as refused:
            await call()
        assert "secret" not in "".join(traceback.format_exception(refused.value))


async def test_a_token_that_is_refused_says_so(monkeypatch):
    with stub_s3() as stub:
        stub.answer = lambda _method, _path: xml_error(409, "invalid_grant")
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY", raising=False)
        for name in ("CLIENT_ID", "CLIENT_SECRET", "TENANT_ID"):
            monkeypatch.setenv(f"AZURE_{name}", "x")
        monkeypatch.setenv("AZURE_AUTHORITY_HOST", stub.endpoint_url)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{stub.endpoint_url}/account")
        store = open_store("az://account/container/x")
        with pytest.raises(RefusedError, match=r"\(no token: 409 invalid_grant\); check AZURE_"):
            await store.create("a", b"x")  # the 409 is not the store's
        with pytest.raises(RefusedError, match="no token"):
            await store.get("a")


IDENTITY = """\
import logging, time, types

class DefaultAzureCredential:
    def get_token(self, *scopes, tenant_id=None):
        assert scopes == ("https://storage.azure.com/.default",)
        {body}
"""


@pytest.mark.parametrize(
    ("body", "code", "line"), [
        ("return types.SimpleNamespace(token='secret-token', expires_on=time.time() + 600)", 3, "is not a lake"),
        ("logging.getLogger('azure.identity').warning('a line'); raise ValueError('no login. Tried: one, two')", 4,
         r"\(no token: ValueError: no login\); check AZURE_STORAGE_ACCOUNT_KEY .* or run `az login`"),
    ], ids=["token", "none"],
)  # fmt: skip
def test_azure_identity_is_asked_where_it_is_installed(tmp_path, body, code, line):
    """Its place is taken by a package of one class, in a process of its own."""
    package = tmp_path / "azure/identity"
    (package / "aio").mkdir(parents=True)
    (package / "__init__.py").write_text(IDENTITY.format(body=body))
    (package / "aio/__init__.py").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AZURE_")}
    with stub_s3() as stub:
        environment |= {"PYTHONPATH": str(tmp_path), "AZURE_STORAGE_ENDPOINT": f"{stub.endpoint_url}/account"}
        command = [f"{sys.prefix}/bin/stepfs", "ls", "az://account/container/x"]
        ended = ran(command, env=environment)
    assert ended.returncode == code, ended.stderr
    assert re.search(line, ended.stderr), ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "secret-token" not in ended.stderr
    assert stub.authorizations == ({"Bearer secret-token"} if code == 3 else set())
