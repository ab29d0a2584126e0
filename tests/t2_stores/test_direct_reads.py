"""Ranged reads beside botocore: whatever a server, a network or a set-up does, the bytes and lines are botocore's.

Each read is made twice: by a store that has read before, so that it asks directly, and by a new one, which asks botocore.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta
from ssl import create_default_context
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import rawserver
import servers
import trio
from at_work import until
from boto3.session import Session
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from directreads import FIRST, KEY, SIZE, asks_directly, learn, read, was_direct
from rawserver import BODY, Reply, part, said, wanted, well

from stepfs.store.s3.direct import _DOUBTS_MAX, DirectReads
from stepfs.store.s3.s3_store import S3Store
from stepfs.store.server_answers import ReadTarget

_XML = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>because</Message></Error>"


def first_then(fault, count=1):
    """The first `count` requests get into `fault`."""
    left = count

    def answer(head):
        nonlocal left
        left -= 1
        return fault(head) if left >= 0 else well(head)

    return answer


def chunked(head):
    body = wanted(head)
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:1000], body[1000:]) if piece)
    return Reply(part(head, b"Transfer-Encoding: chunked", length=-1) + pieces + b"0\r\n\r\n")


def moved(head, status, code):
    """To where botocore finds out by HEAD."""
    if head.startswith(b"HEAD"):
        return Reply(b"HTTP/1.1 200 OK\r\nx-amz-bucket-region: eu-west-9\r\n\r\n")
    return said(status, _XML % code, b"Location: http://127.0.0.1:9/")


FAULTS = {
    "closed after each answer": lambda head: Reply(part(head, b"Connection: close") + wanted(head), end=True),
    "closed without a word": lambda head: Reply(part(head) + wanted(head), end=True),
    "two equal headers": lambda head: Reply(part(head, b"Vary: Origin", b"Vary: Origin") + wanted(head)),
    "200 for a range": lambda _: said(b"200 OK", BODY),
    "chunked": chunked,
    "said to be gzip": lambda head: Reply(part(head, b"Content-Encoding: gzip") + wanted(head)),
    "an older protocol": lambda head: Reply(part(head).replace(b"/1.1", b"/1.0") + wanted(head), end=True),
    "another range": lambda head: Reply(part(head.replace(b"bytes=1", b"bytes=2")) + wanted(head)),
    "less than was asked for": lambda head: Reply(part(head, length=1000) + wanted(head)[:1000]),
    "nothing of what was promised": lambda head: Reply(part(head), end=True),
    "half of what was promised": lambda head: Reply(part(head) + wanted(head)[: len(wanted(head)) // 2], end=True),
    "more than was promised": lambda head: Reply(part(head) + wanted(head) + b"and more"),
    "more than was asked for": lambda head: Reply(part(head, length=len(wanted(head)) + 4) + wanted(head) + b"more"),
    "more at once": lambda head: Reply(part(head, length=5) + wanted(head)),
    "a body that stops": lambda head: Reply(part(head) + wanted(head)[:1000], hang=True),
    "no answer": lambda _: Reply(b"", hang=True),
    "no answer and the end": lambda _: Reply(b"", end=True),
    "half a header": lambda _: Reply(b"HTTP/1.1 206 Partial Con", end=True),
    "not HTTP": lambda _: Reply(b"220 mail.example.org ESMTP\r\n\r\n", end=True),
    "a header of 1 MB": lambda head: Reply(part(head, b"X-Page: " + b"x" * (1 << 20)) + wanted(head), end=True),
    "50 kB of headers": lambda head: Reply(
        part(head, *(b"X-Page-%d: %s" % (number, b"x" * 1000) for number in range(50))) + wanted(head)
    ),
    "a redirect": lambda head: moved(head, b"307 Temporary Redirect", b"TemporaryRedirect"),
    "another region": lambda head: moved(head, b"301 Moved Permanently", b"PermanentRedirect"),
    "503 in HTML": lambda _: said(
        b"503 Service Unavailable", b"<html><h1>Sorry</h1></html>", b"Content-Type: text/html"
    ),
    "500": lambda _: said(b"500 Internal Server Error", _XML % b"InternalError"),
    "429": lambda _: said(b"429 Too Many Requests", _XML % b"TooManyRequests"),
    "a wrong clock": lambda _: said(b"403 Forbidden", _XML % b"RequestTimeTooSkewed"),
    "expired": lambda _: said(b"400 Bad Request", _XML % b"ExpiredToken"),
    "forbidden": lambda _: said(b"403 Forbidden", _XML % b"AccessDenied"),
    "absent": lambda _: said(b"404 Not Found", _XML % b"NoSuchKey"),
    "no bucket": lambda _: said(b"404 Not Found", _XML % b"NoSuchBucket"),
    "past the end": lambda _: said(b"416 Range Not Satisfiable", _XML % b"InvalidRange"),
    "a proxy's page": lambda _: said(b"404 Not Found", b"<html></html>"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_lasts_ends_as_with_botocore(raw_s3, raw_store, fault):
    directly, plain = raw_store(data_timeout_s=0.3), raw_store(data_timeout_s=0.3)
    await learn(raw_s3, directly)
    raw_s3.answer = FAULTS[fault]
    before, asked = directly.counts.get, len(raw_s3.requests)
    found = await read(directly)
    assert directly.counts.get - before == len(raw_s3.requests) - asked, "each request is counted"
    assert was_direct(raw_s3.requests[asked])
    plain._calls.rights.prove("get", [KEY])  # with the same past: a 403 is another line once something was allowed
    assert found == await read(plain)


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_passes_ends_as_with_botocore(raw_s3, raw_store, fault):
    directly = raw_store(data_timeout_s=0.3)
    await learn(raw_s3, directly)
    raw_s3.answer = first_then(FAULTS[fault])
    before, asked, throttled = directly.counts.get, len(raw_s3.requests), directly.counts.throttled
    assert await read(directly) == (SIZE, BODY[FIRST : FIRST + SIZE])
    assert directly.counts.get - before == len(raw_s3.requests) - asked <= 2, "each request is counted"
    assert directly.counts.throttled - throttled == (fault in {"429", "503 in HTML"})
    assert await read(directly) == (SIZE, BODY[FIRST : FIRST + SIZE])
    assert asks_directly(directly)


GOOD = (SIZE, BODY[FIRST : FIRST + SIZE])


def direct_ones(server):
    return [head for head in server.requests if was_direct(head)]


def header(head, name):
    (found,) = [line for line in head.split(b"\r\n") if line.lower().startswith(name + b":")]
    return found.partition(b":")[2].strip()


def request_of_botocore(endpoint_url, style, token, key):
    """A ranged GET as botocore would send it."""
    sent = []

    def note(request, **_):
        sent.append(request)
        return AWSResponse(request.url, 206, {}, SimpleNamespace(stream=lambda: iter([b""])))

    client: Any = Session().client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="eu-west-9",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        aws_session_token=token,
        config=Config(
            s3={"addressing_style": style, "payload_signing_enabled": True},
            response_checksum_validation="when_required",
        ),
    )
    client.meta.events.register("before-send.s3", note)
    client.get_object(Bucket=servers.BUCKET, Key=key, Range="bytes=5-9")
    return sent[0], client._request_signer._credentials


@pytest.mark.parametrize(
    ("endpoint_url", "style"), [
        (None, "virtual"), (None, "path"), ("http://127.0.0.1:9000", "path"), ("http://[::1]:9000", "path"),
        ("https://gateway.example.org/with/a/path", "path"),
        ("https://gateway.example.org:443", "virtual"),
        ("http://Gateway.example.org:80", "path"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("token", [None, "tok/en=="])
@pytest.mark.parametrize("key", ["lake/data/x", "lake/data/p=1/x-_.y"])
def test_a_request_is_signed_as_botocore_signs_it(monkeypatch, endpoint_url, style, token, key):
    request, credentials = request_of_botocore(endpoint_url, style, token, key)
    headers = {name.lower().encode(): value for name, value in request.headers.items()}
    stamp = headers[b"x-amz-date"].decode()
    monkeypatch.setattr(time, "gmtime", lambda: time.strptime(stamp, "%Y%m%dT%H%M%SZ"))
    direct = DirectReads(credentials, create_default_context, 1.0, print, print)
    direct.sent.request = request
    path = key.replace("=", "%3D")
    place = direct._learn(path)
    assert place is not None
    ours = direct._request(place, path, "bytes=5-9")
    first, *_ = ours.split(b"\r\n")
    assert urlsplit(request.url).path == first.split(b" ")[1].decode()
    for name in (b"authorization", b"range", b"x-amz-date", b"x-amz-content-sha256", b"user-agent"):
        assert header(ours, name) == headers[name], name
    assert header(ours, b"host") in request.url.lower().encode()


@pytest.mark.parametrize(
    "change",
    [
        ("Authorization", b"AWS4-HMAC-SHA256 ", b"AWS4-ECDSA-P256-SHA256 "),
        ("Authorization", b"/s3/", b"/s3express/"),
        ("Authorization", b"/s3/", b"/s3-object-lambda/"),
        ("Authorization", b"x-amz-date,", b"x-amz-date;x-amz-request-payer,"),
        ("Authorization", b"SignedHeaders=", b"SignedHeaders=expect;"),
        ("Authorization", b"AWS4-HMAC-SHA256 ", b"Bearer "),
        ("url", "/lake/data/x", "/lake/data/x?X-Amz-Signature=1"),
        ("url", "/lake/data/x", "/lake/data/y"),
    ],
)
def test_what_is_signed_otherwise_stays_with_botocore(change):
    request, credentials = request_of_botocore("http://127.0.0.1:9000", "path", None, "lake/data/x")
    direct = DirectReads(credentials, create_default_context, 1.0, print, print)
    direct.sent.request = request
    assert direct._learn("lake/data/x") is not None
    where, old, new = change
    if where == "url":
        assert old in request.url
        request.url = request.url.replace(old, new)
    else:
        assert old in request.headers[where]
        request.headers[where] = request.headers[where].replace(old, new)
    assert direct._learn("lake/data/x") is None


async def test_a_proxy_in_the_environment_is_kept_to(raw_s3, raw_store, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", raw_s3.endpoint_url)
    store = raw_store("http://s3.example.org:9000")
    for _ in range(2):
        assert await read(store) == GOOD
    assert direct_ones(raw_s3) == []
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    store = raw_store()
    await learn(raw_s3, store)
    assert asks_directly(store)


async def test_an_endpoint_with_a_path_and_one_of_ipv6(raw_s3, raw_store):
    store = raw_store(f"{raw_s3.endpoint_url}/with/a/path")
    await learn(raw_s3, store)
    assert await read(store) == GOOD
    assert raw_s3.requests[-1].startswith(b"GET /with/a/path/stepfs-tests/lake/data/p%3D1/x HTTP/1.1\r\n")
    assert was_direct(raw_s3.requests[-1])
    with rawserver.raw_server("::1") as other:
        store = raw_store(other.endpoint_url)
        await learn(other, store)
        assert await read(store) == GOOD
        assert was_direct(other.requests[-1])


async def test_as_many_connections_as_reads_at_a_time(raw_s3, raw_store):
    store = raw_store()
    await learn(raw_s3, store)
    before = raw_s3.connections
    for _ in range(20):
        assert await read(store) == GOOD
    assert raw_s3.connections - before == 1
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(read, store)
    assert raw_s3.connections - before <= 32
    assert len(direct_ones(raw_s3)) == 70
    assert store.counts.get == 71


async def test_a_connection_that_ended_while_idle_costs_one_more_request_at_most(raw_s3, raw_store):
    store = raw_store()
    await learn(raw_s3, store)
    assert await read(store) == GOOD
    raw_s3.close()  # seen before the next request
    before = store.counts.get
    assert await read(store) == GOOD
    assert store.counts.get - before == 1
    raw_s3.answer = lambda _: Reply(b"", end=True)  # seen by it
    raw_s3.answer = once(raw_s3.answer)
    assert await read(store) == GOOD
    assert store.counts.get - before == 3


def once(fault):
    left = [fault]
    return lambda head: left.pop()(head) if left else well(head)


async def test_a_server_that_is_always_unusual_is_left_to_botocore(raw_s3, raw_store):
    store = raw_store()
    await learn(raw_s3, store)
    raw_s3.answer = lambda head: (
        said(b"403 Forbidden", b"not without amz-sdk-request") if was_direct(head) else well(head)
    )
    for _ in range(20):
        assert await read(store) == GOOD
    assert len(direct_ones(raw_s3)) == _DOUBTS_MAX
    assert not asks_directly(store)


async def test_another_address_is_never_sent_over_an_old_connection(raw_s3, raw_store):
    store = raw_store()
    await learn(raw_s3, store)
    assert await read(store) == GOOD
    with rawserver.raw_server() as other:
        direct = store._clients.direct()
        moved = direct._place.bucket._replace(netloc=other.endpoint_url.removeprefix("http://"))
        direct._place = direct._place._replace(bucket=moved)
        assert await read(store) == GOOD
        assert len(other.requests) == 1


async def test_credentials_that_rotate_are_followed(raw_s3, monkeypatch, tmp_path):
    """They expire so soon that each request asks for new ones."""
    ends = (datetime.now(UTC) + timedelta(seconds=60)).isoformat()
    (tmp_path / "count").write_text("0")
    (tmp_path / "issue.py").write_text(
        f"import json, pathlib; count = pathlib.Path({str(tmp_path / 'count')!r}); n = int(count.read_text()) + 1\n"
        "count.write_text(str(n))\n"
        f"print(json.dumps(dict(Version=1, AccessKeyId=f'key{{n}}', SecretAccessKey='s', SessionToken=f't{{n}}', "
        f"Expiration={ends!r})))"
    )
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {tmp_path / 'issue.py'}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    store = S3Store(servers.BUCKET, "lake", endpoint_url=raw_s3.endpoint_url)
    await learn(raw_s3, store)
    for _ in range(3):
        assert await read(store) == GOOD
    heads = direct_ones(raw_s3)
    assert len(heads) == 3
    keys = [header(head, b"authorization").partition(b"Credential=")[2].partition(b"/")[0] for head in heads]
    tokens = [header(head, b"x-amz-security-token") for head in heads]
    assert len(set(keys)) == len(set(tokens)) == 3
    (tmp_path / "issue.py").write_text("raise SystemExit('no more')")  # botocore says what is wrong
    plain = S3Store(servers.BUCKET, "lake", endpoint_url=raw_s3.endpoint_url)
    plain._calls.rights.prove("get", [KEY])
    assert await read(store) == await read(plain)
    await store.aclose()
    await plain.aclose()


@pytest.mark.parametrize("begun", [False, True], ids=["before the answer", "in the body"])
async def test_a_hung_read_is_left_at_once_and_its_thread_ends(raw_s3, raw_store, begun):
    store = raw_store(data_timeout_s=300)
    await learn(raw_s3, store)
    asked = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def hang(head):
        token.run_sync_soon(asked.set)
        return Reply(part(head) + wanted(head)[:1000] if begun else b"", hang=True)

    raw_s3.answer = hang
    buffer = bytearray(SIZE)
    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.read_into, KEY, FIRST, memoryview(buffer))
        await asked.wait()
        nursery.cancel_scope.cancel()
    seen = bytes(buffer)
    await until(lambda: not store._calls.data_threads.borrowed_tokens)
    assert time.monotonic() - began < 100
    assert buffer == seen
    raw_s3.answer = well
    asked_before = len(raw_s3.requests)
    assert await read(store) == GOOD
    assert len(raw_s3.requests) == asked_before + 1, "the read that was left asked nobody again"


def test_a_server_that_stops_does_not_hold_its_thread():
    with rawserver.raw_server() as server:
        server.answer = lambda head: Reply(part(head) + wanted(head)[:1000], hang=True)
        request, credentials = request_of_botocore(server.endpoint_url, "path", None, "lake/data/x")
        direct = DirectReads(credentials, create_default_context, 0.25, lambda *_: None, print)
        direct.sent.request = request
        direct._place = direct._learn("lake/data/x")
        target = ReadTarget(memoryview(bytearray(SIZE)), lambda _: None)
        began = time.monotonic()
        with pytest.raises(OSError, match="temporarily unavailable"):
            direct.download("lake/data/x", 0, target, lambda: pytest.fail("botocore goes on, later"))
        assert 0.25 <= time.monotonic() - began < 20
        assert target.done == 1000
