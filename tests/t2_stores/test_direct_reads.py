"""Ranged reads beside botocore: whatever a server, a network or a set-up does, the bytes and lines are botocore's.

Each read is made twice: by a store that has read before, so that it asks directly, and by a new one, which asks botocore.
"""

from __future__ import annotations

import pytest
from directreads import FIRST, KEY, SIZE, asks_directly, learn, read, was_direct
from rawserver import BODY, Reply, part, said, wanted, well

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
