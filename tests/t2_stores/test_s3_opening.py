"""What is found out when an S3 store is opened: credentials, buckets, settings, and servers that cannot be trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import boto3
import faultproxy
import pytest
import servers
import trio
from faultproxy import (
    CONFLICT_409,
    RESET_AFTER,
    SKEWED_403,
    SLOW_DOWN_503,
)
from rawserver import Reply
from stubs3 import ABSENT, EMPTY_404, HTML_404, Answer, calls, xml_error

from stepfs.errors import AbsentError, CorruptError, RefusedError, StoreUnreachableError, UsageError
from stepfs.store.api import Put
from stepfs.store.local.local_store import LocalStore
from stepfs.store.opening import open_store
from stepfs.store.probe import examine_store, keeps_versions, probe_store
from stepfs.store.s3 import clients, s3_store
from stepfs.store.s3.s3_store import S3Store


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
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
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


async def test_a_request_signed_before_a_suspension_is_signed_again(proxied, direct, fault_proxy):
    await direct.put("data/1", [b"x" * 1000])
    fault_proxy.once("GET", "data/1", SKEWED_403)
    assert await proxied.get("data/1") == b"x" * 1000
    fault_proxy.once("PUT", "log/1", SKEWED_403)
    assert await proxied.create("log/1", b"mine") is Put.CREATED
    fault_proxy.randomly({SKEWED_403: 1.0})  # the clock is wrong
    with pytest.raises(RefusedError, match="clock is wrong"):
        await proxied.get("data/1")
    fault_proxy.randomly({})


async def test_a_body_without_a_length_is_read_as_far_as_makes_sense(raw_s3, raw_store):
    """A proxy that sends in chunks leaves the length out; it was a KeyError."""
    pieces = b"".join(b"3e8\r\n%s\r\n" % (b"x" * 1000) for _ in range(3000))
    raw_s3.answer = lambda _: Reply(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n")
    store = raw_store()
    assert await store.get("log/1") == b"x" * 3_000_000
    with pytest.raises(CorruptError, match="more than 2999999 bytes"):
        await store.get("log/1", bytes_max=2_999_999)


XML = {"Content-Type": "application/xml"}


def state(inside: str) -> Answer:
    namespace = "http://s3.amazonaws.com/doc/2006-03-01/"
    text = f'<VersioningConfiguration xmlns="{namespace}">{inside}</VersioningConfiguration>'
    return Answer(body=text.encode(), headers=XML)


ENABLED = state("<Status>Enabled</Status>")
LISTING = Answer(body=b"<ListBucketResult><Name>x</Name></ListBucketResult>", headers=XML)
SILENT_ABOUT_IT = {
    "never versioned": state(""), "suspended": state("<Status>Suspended</Status>"),
    "no right to ask": xml_error(403, "AccessDenied"), "expired": xml_error(400, "ExpiredToken"),
    "unknown call": xml_error(501, "NotImplemented"), "unknown query": xml_error(400, "InvalidArgument"),
    "no such route": EMPTY_404, "a proxy's page": HTML_404, "a listing": LISTING,
    "no XML": Answer(body=b"what?", headers=XML), "nothing": Answer(), "not now": xml_error(503, "SlowDown"),
}  # fmt: skip


async def test_a_versioned_bucket_is_asked_once_and_says_so(stubbed, stub):
    stub.answer = lambda _method, _path: ENABLED
    assert await keeps_versions(stubbed)
    assert stub.requests == [("GET", f"/{servers.BUCKET}?versioning")]


@pytest.mark.parametrize("answer", SILENT_ABOUT_IT.values(), ids=SILENT_ABOUT_IT.keys())
async def test_what_is_no_clear_yes_is_no(stubbed, stub, answer):
    stub.answer = lambda _method, _path: answer
    assert not await keeps_versions(stubbed)


async def test_a_server_that_never_answers_is_not_waited_for(stubbed, stub, monkeypatch):
    monkeypatch.setattr(s3_store, "_ADVICE_S", 0.1)
    answered = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def answer(_method: str, _path: str) -> Answer:
        trio.from_thread.run(answered.wait, trio_token=token)
        return ENABLED

    stub.answer = answer
    assert not await keeps_versions(stubbed)
    answered.set()


async def test_leave_to_ask_proves_no_right_to_read(stubbed, stub):
    stub.answer = lambda _method, _path: ENABLED
    await keeps_versions(stubbed)
    stub.answer = lambda _method, _path: xml_error(403, "AccessDenied")
    with pytest.raises(RefusedError, match="the server refuses these credentials"):
        await stubbed.get("lake.msgpack")


async def test_a_real_server_says_it_while_versioning_is_on(seaweed):
    bucket = "stepfs-versioned"
    with closing(boto3.client("s3")) as client:
        client.create_bucket(Bucket=bucket)
        store = S3Store(bucket, "lake")
        assert not await keeps_versions(store)
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        assert await keeps_versions(store)
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})
        assert not await keeps_versions(store)
        await store.aclose()


async def test_a_directory_keeps_nothing(tmp_path):
    assert not await keeps_versions(LocalStore(tmp_path))


@pytest.mark.parametrize("verb", ["get", "create"])
async def test_a_connection_that_was_idle_for_long_is_not_used_again(stubbed, stub, monkeypatch, verb):
    """A balancer forgets it without a word; the next request would wait for its whole timeout."""
    call = calls(stubbed)[verb]
    stub.answer = lambda method, _path: ABSENT if method == "GET" else Answer(headers={"ETag": '"x"'})
    for _ in range(3):
        await call()
    assert stub.connections == 1
    monkeypatch.setattr(clients, "IDLE_S", -1.0)
    for _ in range(3):
        await call()
    assert stub.connections == 4


async def test_an_answer_without_an_end_takes_no_memory(stubbed, stub, monkeypatch):
    """Objects have bounds of their own; a LIST is read whole."""
    stub.answer = lambda _method, _path: Answer(body=bytes(5000))
    monkeypatch.setattr(clients, "_ANSWER_BYTES_MAX", 4999)
    with pytest.raises(StoreUnreachableError, match="an answer of more than"):
        await stubbed.list("x/")
    assert await stubbed.get("a") == bytes(5000)


async def test_what_is_no_regions_name_is_named(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_ENDPOINT_URL")]:
        monkeypatch.delenv(name)
    for name, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "eu west"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu west")  # the one that boto3 reads
    store = S3Store(servers.BUCKET, "lake")
    with pytest.raises(UsageError, match=r"region 'eu west': set AWS_REGION"):
        await store.get("a")
    await store.aclose()
