"""A bucket that keeps versions is named; a server that does not say, or says it never, is passed over in silence."""

from __future__ import annotations

from contextlib import closing

import boto3
import pytest
import servers
import trio
from stubs3 import EMPTY_404, HTML_404, Answer, xml_error

from stepfs.errors import RefusedError
from stepfs.store.local.local_store import LocalStore
from stepfs.store.probe import keeps_versions
from stepfs.store.s3 import s3_store
from stepfs.store.s3.s3_store import S3Store

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
