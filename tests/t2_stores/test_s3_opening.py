"""What is found out when an S3 store is opened: credentials, buckets, settings, and servers that cannot be trusted."""

from __future__ import annotations

import os
import subprocess
import sys

import faultproxy
import pytest
import servers
import trio
from faultproxy import (
    CONFLICT_409,
    RESET_AFTER,
    SLOW_DOWN_503,
)

from stepfs.errors import AbsentError, RefusedError, StoreUnreachableError, UsageError
from stepfs.store.api import Put
from stepfs.store.opening import open_store
from stepfs.store.probe import examine_store, probe_store


async def test_wrong_credentials_are_refused(s3_url, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(s3_url)
    for call in (lambda: store.get("a"), lambda: store.create("a", b""), lambda: store.put("a", [b""])):
        with pytest.raises(RefusedError, match=r"SignatureDoesNotMatch.*check AWS_ACCESS_KEY_ID") as refused:
            await call()
        assert "wrong" not in str(refused.value)
    assert store.counts.create == 1
    await store.aclose()


async def test_missing_credentials_are_named(s3_url, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_store(s3_url)
    for call in (lambda: store.get("a"), lambda: store.create("a", b"")):
        with pytest.raises(RefusedError, match="check AWS_ACCESS_KEY_ID"):
            await call()
    assert store.counts.requests == 0
    await store.aclose()


async def test_an_absent_bucket_is_named(seaweed):
    store = open_store("s3://no-such-bucket/x")
    for call in (
        lambda: store.get("a"),
        lambda: store.read_into("a", 0, memoryview(bytearray(1))),
        lambda: store.create("a", b""),
        lambda: store.put("a", [b""]),
        lambda: store.list(""),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(
            AbsentError,
            match=r"the bucket of s3://no-such-bucket.* does not exist \(NoSuchBucket\); create it first",
        ):
            await call()
    await store.aclose()


async def test_a_server_that_is_not_there_is_unreachable(seaweed):
    port = servers.free_port_of_nobody()
    store = open_store("s3://stepfs-tests/x", endpoint_url=f"http://127.0.0.1:{port}")
    with pytest.raises(StoreUnreachableError, match="check the network and AWS_ENDPOINT_URL_S3"):
        await store.get("a")
    assert await store.create("a", b"") is Put.UNKNOWN
    await store.aclose()


async def test_settings_that_cannot_work_are_named(monkeypatch):
    with pytest.raises(UsageError, match="endpoint 'nonsense': write a URL"):
        await open_store("s3://stepfs-tests/x", endpoint_url="nonsense").get("a")
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(UsageError, match="no-such-profile"):
        await open_store("s3://stepfs-tests/x").get("a")


@pytest.mark.parametrize("host", ["storage.googleapis.com", "bucket.storage.googleapis.com:443"])
async def test_googles_s3_endpoint_is_refused_by_name(seaweed, monkeypatch, host):
    """It ignores If-None-Match on writes. Nothing is sent to it."""
    store = open_store("s3://stepfs-tests/x", endpoint_url=f"https://{host}")
    with pytest.raises(RefusedError, match=r"storage.googleapis.com ignores If-None-Match .*use gs://"):
        await store.create("a", b"x")
    assert store.counts.requests == 0
    await store.aclose()


@pytest.mark.parametrize("thorough", [False, True])
async def test_a_server_that_ignores_conditions_is_refused_by_name(seaweed, rclone, thorough):
    """Hazard 4."""
    store = open_store(f"s3://{servers.BUCKET}/x", endpoint_url=rclone.endpoint_url)
    with pytest.raises(RefusedError, match=r"rclone serve s3.*the condition is ignored"):
        await probe_store(store, thorough=thorough)
    report = await examine_store(store)
    assert not report.fit
    assert report.server == "AmazonS3"
    assert await store.list("probe/") == []
    await store.aclose()


async def test_a_probe_waits_for_a_decision_but_not_for_ever(proxied, fault_proxy):
    fault_proxy.once("PUT", "probe/", CONFLICT_409)
    fault_proxy.once("PUT", "probe/", RESET_AFTER)
    await probe_store(proxied, thorough=False)
    for _ in range(3):
        fault_proxy.once("PUT", "probe/", SLOW_DOWN_503)
    with pytest.raises(StoreUnreachableError, match="does not decide"):
        await probe_store(proxied, thorough=False)


async def test_a_forked_process_is_refused_not_hung(direct):
    await direct.get("a")
    code = os.fork()
    if code == 0:  # no trio in the child: only the client's own check
        try:
            direct._clients.data()
        except RefusedError:
            os._exit(42)
        os._exit(1)
    status = await trio.to_thread.run_sync(os.waitpid, code, 0)
    assert os.waitstatus_to_exitcode(status[1]) == 42


async def test_opening_sends_nothing_and_imports_boto3_late(seaweed):
    program = (
        "import sys, stepfs.store.opening as o; o.open_store('file:///nowhere'); "
        "assert 'boto3' not in sys.modules and 'botocore' not in sys.modules; "
        "o.open_store('s3://no-such-bucket/x'); assert 'boto3' in sys.modules"
    )
    environment = {**os.environ, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}
    done = await trio.run_process([sys.executable, "-c", program], env=environment, stderr=subprocess.STDOUT)
    assert done.returncode == 0


async def test_encryption_asked_for_by_the_environment_is_passed_on(proxied, fault_proxy, monkeypatch):
    sent = {}

    def look(request, **_kwargs):
        sent.update(request.headers)

    proxied._clients.data().meta.events.register("before-send.s3.PutObject", look)
    monkeypatch.setenv("STEPFS_SSE", "aws:kms")
    monkeypatch.setenv("STEPFS_SSE_KMS_KEY_ID", "some-key")
    fault_proxy.once("PUT", "a", faultproxy.Trouble("not for SeaweedFS", forwarded=False, status=409))
    with pytest.raises(RefusedError):
        await proxied.put("a", [b"x"])
    assert sent["x-amz-server-side-encryption"] == b"aws:kms"
    assert sent["x-amz-server-side-encryption-aws-kms-key-id"] == b"some-key"
