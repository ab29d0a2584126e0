"""What only a network and an S3 server can do wrong, on real bytes: a fault proxy in front of SeaweedFS."""

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
    ERROR_500,
    ERROR_500_APPLIED,
    FALSE_412,
    LOST_REQUEST,
    LOST_RESPONSE,
    RESET_AFTER,
    RESET_BEFORE,
    SHORT_BODY,
    SKEWED_403,
    SLOW_DOWN_503,
    TOO_MANY_429,
)

from stepfs.errors import AbsentError, CorruptError, RefusedError, StoreUnreachableError, UsageError
from stepfs.store.api import Put
from stepfs.store.opening import open_store
from stepfs.store.probe import examine_store, probe_store
from stepfs.store.s3.s3_store import S3Store
from stepfs.store.s3.upload import SINGLE_BYTES_MAX


@pytest.fixture
async def direct(s3_url):
    store = open_store(s3_url)
    yield store
    await store.aclose()


def through(proxy, direct, **timeouts):
    prefix = direct.url.removeprefix(f"s3://{servers.BUCKET}/")
    return S3Store(servers.BUCKET, prefix, endpoint_url=proxy.endpoint_url, **timeouts)


@pytest.fixture
async def proxied(fault_proxy, direct):
    store = through(fault_proxy, direct)
    yield store
    with trio.CancelScope(shield=True):
        await store.aclose()


@pytest.fixture
async def hasty(fault_proxy, direct):
    """Gives up early on an answer that never comes; a busy server may also be too slow for it."""
    store = through(fault_proxy, direct, commit_timeout_s=2.0, data_timeout_s=2.0)
    yield store
    with trio.CancelScope(shield=True):
        await store.aclose()


async def test_the_proxy_alone_changes_nothing(proxied, direct, fault_proxy):
    assert await proxied.create("log/1", b"x") is Put.CREATED
    assert await proxied.create("log/1", b"x") is Put.EXISTS
    await proxied.put("data/1", [b"y" * (5 << 20)])
    assert await direct.get("data/1") == await proxied.get("data/1") == b"y" * (5 << 20)
    assert [entry.key for entry in await proxied.list("")] == ["data/1", "log/1"]
    await proxied.delete(["data/1"])
    assert await direct.get("data/1") is None
    assert {handled.trouble for handled in fault_proxy.handled} == {""}


@pytest.mark.parametrize("trouble", [LOST_RESPONSE, RESET_AFTER, ERROR_500_APPLIED], ids=lambda t: t.name)
async def test_an_ambiguous_create_is_unknown_and_happened(hasty, direct, fault_proxy, trouble):
    """Hazard 2: exactly one attempt; a second one would report 412 for our own success."""
    fault_proxy.once("PUT", "log/1", trouble)
    assert await hasty.create("log/1", b"mine") is Put.UNKNOWN
    assert await direct.get("log/1") == b"mine"
    assert hasty.counts.create == 1
    assert [handled.method for handled in fault_proxy.handled] == ["PUT"]


@pytest.mark.parametrize(
    "trouble", [LOST_REQUEST, RESET_BEFORE, ERROR_500, SLOW_DOWN_503], ids=lambda t: t.name
)
async def test_a_create_that_did_not_happen_is_unknown_too(hasty, direct, fault_proxy, trouble):
    fault_proxy.once("PUT", "log/1", trouble)
    assert await hasty.create("log/1", b"mine") is Put.UNKNOWN
    assert await direct.get("log/1") is None
    assert hasty.counts.create == 1


async def test_a_create_may_land_after_it_was_given_up(proxied, direct, fault_proxy):
    fault_proxy.once("PUT", "log/1", faultproxy.delayed(0.3))
    assert await proxied.create("log/1", b"mine") is Put.UNKNOWN
    with trio.fail_after(10):
        while await direct.get("log/1") is None:  # noqa: ASYNC110 - the server tells nobody
            await trio.sleep(0.05)


async def test_409_is_retry_and_412_is_exists(proxied, fault_proxy):
    """Hazard 3: a conflict is undecided, not taken."""
    fault_proxy.once("PUT", "log/1", CONFLICT_409)
    fault_proxy.once("PUT", "log/1", FALSE_412)
    assert await proxied.create("log/1", b"mine") is Put.RETRY
    assert await proxied.create("log/1", b"mine") is Put.EXISTS
    assert await proxied.create("log/1", b"mine") is Put.CREATED


@pytest.mark.parametrize(
    "trouble", [RESET_BEFORE, RESET_AFTER, ERROR_500, SLOW_DOWN_503, LOST_RESPONSE], ids=lambda t: t.name
)
async def test_everything_but_create_is_retried_and_each_attempt_counted(hasty, direct, fault_proxy, trouble):
    await direct.put("a", [b"x"])
    for method, part, call, verb in [
        ("GET", "/a", lambda: hasty.get("a"), "get"),
        ("GET", "list-type", lambda: hasty.list(""), "list"),
        ("PUT", "/b", lambda: hasty.put("b", [b"y"]), "put"),
        ("POST", "delete", lambda: hasty.delete(["b"]), "delete"),
    ]:
        before = getattr(hasty.counts, verb)
        fault_proxy.once(method, part, trouble)
        await call()
        assert getattr(hasty.counts, verb) - before == 2, verb
    assert hasty.counts.requests == len(fault_proxy.handled)


async def test_a_short_body_is_asked_for_again_from_where_it_broke(proxied, direct, fault_proxy):
    body = os.urandom(4 << 20)
    await direct.put("data/1", [body])
    fault_proxy.once("GET", "data/1", SHORT_BODY)
    fault_proxy.once("GET", "data/1", SHORT_BODY)
    buffer = bytearray(len(body))
    assert await proxied.read_into("data/1", 0, memoryview(buffer)) == len(body)
    assert buffer == body
    assert proxied.counts.get == 3
    assert proxied.counts.bytes_read == len(body)
    fault_proxy.once("GET", "data/1", SHORT_BODY)
    assert await proxied.get("data/1") == body


async def test_a_body_that_never_comes_whole_is_unreachable(proxied, direct, fault_proxy):
    await direct.put("data/1", [b"x" * 1000])
    fault_proxy.randomly({SHORT_BODY: 1.0})
    with pytest.raises(StoreUnreachableError, match="cannot read data/1"):
        await proxied.get("data/1")
    fault_proxy.randomly({})


async def test_throttling_that_lasts_is_unreachable_and_not_refused(proxied, direct, fault_proxy):
    await direct.put("data/1", [b"x" * 1000])
    fault_proxy.randomly({TOO_MANY_429: 1.0})
    with pytest.raises(StoreUnreachableError, match="cannot read data/1"):
        await proxied.read_into("data/1", 0, memoryview(bytearray(1000)))
    assert await proxied.create("log/1", b"mine") is Put.UNKNOWN
    fault_proxy.randomly({})


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


async def test_keys_that_a_server_puts_off_are_deleted_again(direct, monkeypatch):
    """S3 answers 200 with an error for a single key now and then; botocore does not look at those."""
    await direct.put("a", [b"x"])
    await direct.put("b", [b"x"])
    real, answers = direct._delete, [{"b": "InternalError"}, {"b": "SlowDown"}, {}]
    asked = []

    def delete(keys):
        asked.append(tuple(keys))
        real(keys)
        return answers.pop(0)

    monkeypatch.setattr(direct, "_delete", delete)
    await direct.delete(["a", "b"])
    assert asked == [("a", "b"), ("b",), ("b",)]
    monkeypatch.setattr(direct, "_delete", lambda keys: dict.fromkeys(keys, "InternalError"))
    with pytest.raises(StoreUnreachableError, match=r"cannot delete a .* puts it off"):
        await direct.delete(["a"])
    monkeypatch.setattr(direct, "_delete", lambda keys: {"a": "InternalError", "b": "AccessDenied"})
    with pytest.raises(RefusedError, match=r"cannot delete b .*AccessDenied.*rights"):
        await direct.delete(["a", "b"])


async def test_a_big_upload_survives_trouble_and_is_verified(proxied, direct, fault_proxy):
    body = os.urandom(100 << 20)
    for trouble, part in [
        (RESET_BEFORE, "partNumber=2"),
        (ERROR_500, "partNumber=3"),
        (RESET_AFTER, "partNumber=4"),
    ]:
        fault_proxy.once("PUT", part, trouble)
    fault_proxy.once("POST", "uploadId", RESET_AFTER)
    await proxied.put("data/big", [body[: 30 << 20], body[30 << 20 :]])
    buffer = bytearray(len(body))
    assert await direct.read_into("data/big", 0, memoryview(buffer)) == len(body)
    assert buffer == body
    assert proxied.counts.put == len(fault_proxy.handled)


async def test_a_failed_big_upload_is_given_back(proxied, direct, fault_proxy):
    def break_pieces(method, part):
        for _ in range(40):
            fault_proxy.once(method, part, ERROR_500)

    break_pieces("PUT", "partNumber=2")
    with pytest.raises(StoreUnreachableError, match="cannot write data/big"):
        await proxied.put("data/big", [b"x" * (SINGLE_BYTES_MAX + 1)])
    assert fault_proxy.handled[-1].method == "DELETE"  # after the last piece
    assert await direct.list("") == []


async def test_a_cancelled_big_upload_is_given_back(proxied, direct, fault_proxy):
    fault_proxy.once("PUT", "partNumber=2", faultproxy.Trouble("slow", delay_s=1.0))
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(proxied.put, "data/big", [b"x" * (200 << 20)])
            while len(fault_proxy.handled) < 4:  # noqa: ASYNC110 - until pieces are on their way
                await trio.sleep(0.01)
            scope.cancel()
    assert fault_proxy.handled[-1].method == "DELETE"
    assert len(fault_proxy.handled) < 14  # not all of the 13 pieces
    assert await direct.list("") == []


async def test_a_cancelled_upload_returns_at_once_and_never_becomes_other_bytes(proxied, direct, fault_proxy):
    fault_proxy.once("PUT", "data/1", faultproxy.Trouble("slow", delay_s=0.5))
    body = bytearray(b"x" * (32 << 20))
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(proxied.put, "data/1", [body])
            while not fault_proxy.handled:  # noqa: ASYNC110 - until it is on its way
                await trio.sleep(0.01)
            scope.cancel()
    body[:] = b"y" * len(body)
    with trio.fail_after(10):
        while proxied._threads.borrowed_tokens:  # noqa: ASYNC110 - an abandoned thread tells nobody
            await trio.sleep(0.02)
    assert len(fault_proxy.handled) == 1
    assert await direct.get("data/1") is None


async def test_a_cancelled_read_lets_go_of_the_buffer_and_the_connection(proxied, direct, fault_proxy):
    await direct.put("data/1", [b"x" * (8 << 20)])
    fault_proxy.once("GET", "data/1", faultproxy.slowly(1 << 20))
    buffer = bytearray(8 << 20)
    started = trio.current_time()
    with trio.move_on_after(1.0):
        await proxied.read_into("data/1", 0, memoryview(buffer))
    assert trio.current_time() - started < 3.0  # not the timeout, nor the 8 s transfer
    buffer[:] = b"m" * len(buffer)
    with trio.fail_after(10):
        while proxied._threads.borrowed_tokens:  # noqa: ASYNC110 - an abandoned thread tells nobody
            await trio.sleep(0.02)
    assert buffer == b"m" * len(buffer)


async def test_a_cancelled_create_still_reports_how_it_ended(proxied, fault_proxy):
    fault_proxy.once("PUT", "log/1", faultproxy.Trouble("late answer", delay_s=0.5))
    with trio.CancelScope() as scope:
        scope.cancel()
        await trio.lowlevel.cancel_shielded_checkpoint()
        outcome = None
        try:
            outcome = await proxied.create("log/1", b"x")
        except trio.Cancelled:
            assert not fault_proxy.handled  # cancelled before it was sent
            raise
    assert outcome in {None, Put.CREATED}


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
        with pytest.raises(AbsentError, match="bucket no-such-bucket does not exist; create it first"):
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


@pytest.mark.parametrize("thorough", [False, True])
async def test_a_server_that_ignores_conditions_is_refused_by_name(seaweed, rclone, thorough):
    """Hazard 4."""
    store = open_store(f"s3://{servers.BUCKET}/x", endpoint_url=rclone.endpoint_url)
    with pytest.raises(RefusedError, match=r"rclone serve s3.*If-None-Match is ignored"):
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


async def test_get_does_not_read_what_it_refuses(proxied, direct):
    await direct.put("data/1", [b"x" * (8 << 20)])
    with pytest.raises(CorruptError, match="8388608 bytes, at most 1000"):
        await proxied.get("data/1", bytes_max=1000)
    assert proxied.counts.bytes_read == 0
