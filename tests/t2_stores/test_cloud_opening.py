"""Opening gs:// and az://: URLs, endpoints, and the package that they need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from contextlib import suppress
from functools import partial

import cloudservers
import pytest
import servers
import trio
from certificates import self_signed
from finished import ran
from stubs3 import Answer, stub_s3, xml_error

from stepfs.errors import AbsentError, MissingPackageError, RefusedError, StoreUnreachableError, UsageError
from stepfs.lake.identity import create_lake
from stepfs.store.api import Put
from stepfs.store.opening import open_store
from stepfs.store.probe import probe_store
from stepfs_producer import AsyncProducer


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://", "'' is not a bucket name; write gs://bucket/prefix"),
        ("gs://B/", "'B' is not a bucket name; write gs://bucket/prefix"),
        ("gs://bucket/a/../b", "its parts take letters"),
        ("az://", "'' is not an account name; write az://account/container/prefix"),
        ("az://account", "'' is not a container name; write az://account/container/prefix"),
        ("az://account/", "'' is not a container name; write az://account/container/prefix"),
        ("az://my-account/container", "'my-account' is not an account name"),
        ("gs://user:secret@bucket/a", "credentials and options do not belong into a URL"),
        ("az://account/container?sig=secret", "do not belong into a URL.*; check AZURE_STORAGE_ACCOUNT_KEY"),
        ("azure://account/container", "unknown scheme 'azure'; do you mean az://account/container"),
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


@pytest.mark.nightly
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


@pytest.mark.parametrize(
    ("kind", "advice"), [
        ("gs", "check GOOGLE_APPLICATION_CREDENTIALS"),
        pytest.param("az", "check AZURE_STORAGE_ACCOUNT_KEY", marks=pytest.mark.nightly),
    ],
)  # fmt: skip
async def test_credentials_that_cannot_be_had_are_refused_with_what_to_check(request, monkeypatch, kind, advice):
    """`AZURE_MSI_ENDPOINT`: not the one of the machine that runs this test."""
    url = request.getfixturevalue(f"{kind}_url")
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY", raising=False)
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"http://127.0.0.1:{servers.free_port_of_nobody()}/")
    store = open_store(url)
    for call in (lambda: store.get("a"), lambda: store.create("a", b""), lambda: store.list("")):
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


async def test_a_container_that_is_not_there_is_named(cloud):
    store = open_store(cloud.url.replace(servers.BUCKET, "no-such-place"))
    for call in (
        lambda: store.get("a"),
        lambda: store.read_into("a", 0, memoryview(bytearray(1))),
        lambda: store.create("a", b""),
        lambda: store.put("a", [b""]),
        lambda: store.list(""),
    ):
        with pytest.raises(AbsentError, match=r"of .*no-such-place.* does not exist .*create it first"):
            await call()


async def test_what_a_probe_found_is_told_also_where_it_cannot_clean_up(monkeypatch):
    """Azurite answers 500 to a batch of deletes with a SAS."""
    monkeypatch.setattr("stepfs._internal.entropy.uniform", lambda low, _: low)
    with stub_s3() as stub:
        refusals = {"PUT": xml_error(403, "AuthorizationPermissionMismatch"), "POST": Answer(500)}
        stub.answer = lambda method, _: refusals.get(method, xml_error(404, "BlobNotFound"))
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{stub.endpoint_url}/account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", cloudservers.KEY)
        with pytest.raises(RefusedError, match="403 AuthorizationPermissionMismatch"):
            await probe_store(open_store("az://account/container/x"), thorough=True)


async def test_a_server_that_is_not_there_is_unreachable(monkeypatch):
    monkeypatch.setattr("stepfs._internal.entropy.uniform", lambda low, _: low)
    monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{servers.free_port_of_nobody()}")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "x")
    store = open_store("gs://bucket/x")
    with pytest.raises(StoreUnreachableError, match="Connection refused; check the network and GOOGLE_BASE"):
        await store.get("a")
    assert await store.create("a", b"") is Put.UNKNOWN
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "https://nobody.invalid")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", cloudservers.KEY)
    with pytest.raises(StoreUnreachableError, match="check the account's name, the network"):
        await open_store("az://nobody/container").get("a")


async def test_a_server_nobody_vouches_for_is_refused(monkeypatch, nursery, tmp_path):
    context = self_signed(tmp_path).of_server()

    async def serve(stream):
        with suppress(trio.BrokenResourceError):  # the handshake that failed
            await stream.receive_some()

    listeners = await nursery.start(partial(trio.serve_ssl_over_tcp, serve, 0, context, host="127.0.0.1"))
    port = listeners[0].transport_listener.socket.getsockname()[1]
    monkeypatch.setenv("GOOGLE_BASE_URL", f"https://127.0.0.1:{port}")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "x")
    store = open_store("gs://bucket/x")
    for call in (lambda: store.get("a"), lambda: store.create("a", b"x")):
        with pytest.raises(RefusedError, match=r"certificate does not verify .*set SSL_CERT_FILE"):
            await call()


@pytest.mark.parametrize("thorough", [False, True])
async def test_a_server_that_ignores_conditions_is_refused(tmp_path, monkeypatch, thorough):
    """Hazard 4, as of gcp-storage-emulator."""
    with cloudservers.google(tmp_path, lies=True) as liar:
        for name, value in liar.environment().items():
            monkeypatch.setenv(name, value)
        store = open_store(f"{liar.home}/x")
        with pytest.raises(RefusedError, match="cannot hold a lake: conditional create: the condition is ignored"):
            await probe_store(store, thorough=thorough)
        assert await store.list("probe/") == []


async def test_an_uncontended_commit_takes_three_requests(cloud):
    store = open_store(cloud.url)
    await create_lake(store, slices=1)
    async with AsyncProducer(cloud.url, producer_id="p", store=store) as producer:
        await producer.append([b"x"], position=1)
        await producer.flush()
        store.counts.keys = []
        await producer.append([b"x"], position=2)
        await producer.flush()
        rooms = [f"{verb} {key.split('/')[1]}" for verb, key in store.counts.keys]
    assert rooms == ["put data", "get log", "create log", "get control"]


async def test_a_forked_process_is_refused_not_hung(cloud):
    await cloud.direct.get("a")
    code = os.fork()
    if code == 0:  # no trio in the child: only the client's own check
        try:
            cloud.direct._place.client(1.0)
        except RefusedError:
            os._exit(42)
        os._exit(1)
    status = await trio.to_thread.run_sync(os.waitpid, code, 0)
    assert os.waitstatus_to_exitcode(status[1]) == 42


async def test_a_key_that_is_listed_and_gone_reads_as_none(cloud):
    await cloud.direct.put("a/1", [b"x"])
    (entry,) = await cloud.direct.list("a/")
    await cloud.direct.delete(["a/1"])
    assert await cloud.direct.get(entry.key) is None
    assert await cloud.direct.read_into(entry.key, 0, memoryview(bytearray(1))) is None
